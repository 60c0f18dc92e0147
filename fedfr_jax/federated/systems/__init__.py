"""Client systems: dropout, stragglers, device speed, availability."""
