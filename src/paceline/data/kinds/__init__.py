"""One module for each kind of dataset. The registry lists them; `of_value` finds the one that takes a value."""
