"""Face recognition by FedFR and any other algorithm."""
