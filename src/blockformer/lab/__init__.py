"""`blockformer lab`: configs trained alike and compared. Never part of a repo; start with `experiment.py`."""
