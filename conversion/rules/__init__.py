"""The rule table that converts tensors both ways, and the reversible operations its rules use."""
