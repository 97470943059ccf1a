"""Loading: model, engine and texts from the settings, and what to tell people of them."""
