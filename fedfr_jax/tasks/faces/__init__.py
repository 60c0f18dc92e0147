"""Face recognition: FedFR's rows, and classical algorithms beside them."""
