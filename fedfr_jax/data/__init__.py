"""Images and who holds them."""
