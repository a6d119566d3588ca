"""What the tests of compiled steps share."""

import pytest

from blockformer.engine import step_functions


@pytest.fixture
def untraced(monkeypatch):
    """Run the functions that would be compiled as they are."""
    monkeypatch.setattr(step_functions, "compiled", lambda function, device: function)
