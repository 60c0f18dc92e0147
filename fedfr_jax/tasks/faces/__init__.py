"""Face recognition: FedFR, and any other algorithm."""
