"""A budget of time and steps, and the learning rate that follows it."""

import pytest

from blockformer.training.budget import Budget, learning_rate_factor


def test_learning_rate_follows_the_budget():
    factors = [learning_rate_factor(used / 100) for used in range(101)]
    assert max(factors) == pytest.approx(factors[5]) == pytest.approx(1.0)
    assert factors[:6] == sorted(factors[:6])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == pytest.approx(0.05)
    assert all(factor > 0 for factor in factors)


def test_budget_ends_by_steps_or_by_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("blockformer.training.budget.time.perf_counter", lambda: now[0])
    budget = Budget(seconds=10, max_steps=100)
    assert budget.used(0) == 0
    assert budget.used(25) == 0.25
    now[0] += 5
    assert budget.used(25) == 0.5
    now[0] += 100
    assert budget.used(25) == 1.0
    assert Budget(seconds=10, max_steps=100).used(250) == 1.0
