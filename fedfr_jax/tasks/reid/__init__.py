"""Person re-identification across cameras."""
