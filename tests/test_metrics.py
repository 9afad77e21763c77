"""The measures against loops over the accuracy matrix, and by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from selfless import metrics

A = np.array([[0.9, 0.2, 0.1], [0.8, 0.95, 0.3], [0.7, 0.85, 0.9]])
B = np.array([0.1, 0.1, 0.15])
LOWER = np.where(np.tri(3) > 0, A, np.nan)

matrices = st.integers(2, 6).flatmap(lambda t: hnp.arrays(np.float64, (t, t), elements=st.floats(0, 1)))


def test_by_hand():
    assert metrics.summary(A, B) == pytest.approx(
        {
            "average": (0.7 + 0.85 + 0.9) / 3,
            "forgetting": ((0.9 - 0.7) + (0.95 - 0.85)) / 2,
            "backward_transfer": ((0.7 - 0.9) + (0.85 - 0.95)) / 2,
            "forward_transfer": ((0.2 - 0.1) + (0.3 - 0.15)) / 2,
            "learning_accuracy": (0.9 + 0.95 + 0.9) / 3,
        }
    )


@given(matrices)
def test_against_loops(a):
    T = len(a)
    assert metrics.average(a) == pytest.approx(sum(a[T - 1, u] for u in range(T)) / T)
    assert metrics.learning_accuracy(a) == pytest.approx(sum(a[u, u] for u in range(T)) / T)
    forgot = [max(a[t, u] for t in range(T - 1)) - a[T - 1, u] for u in range(T - 1)]
    assert metrics.forgetting(a) == pytest.approx(sum(forgot) / (T - 1))
    back = [a[T - 1, u] - a[u, u] for u in range(T - 1)]
    assert metrics.backward_transfer(a) == pytest.approx(sum(back) / (T - 1))
    ahead = [a[u - 1, u] - a[0, u] for u in range(1, T)]
    assert metrics.forward_transfer(a, a[0]) == pytest.approx(sum(ahead) / (T - 1))


@given(matrices)
def test_forgetting_is_at_least_the_loss_since_learning(a):
    assert metrics.forgetting(a) >= -metrics.backward_transfer(a) - 1e-12


@given(matrices, st.floats(0.5, 100))
def test_units_scale_every_measure(a, scale):
    one, other = metrics.summary(a, a[0]), metrics.summary(scale * a, scale * a[0])
    assert other == pytest.approx({key: scale * value for key, value in one.items()}, abs=1e-9)


def test_entries_above_the_diagonal_may_be_missing():
    for measure in (metrics.average, metrics.forgetting, metrics.backward_transfer, metrics.learning_accuracy):
        assert measure(LOWER) == pytest.approx(measure(A))
    assert math.isnan(metrics.summary(LOWER, B)["forward_transfer"])
    assert math.isnan(metrics.summary(A)["forward_transfer"])
    with pytest.raises(ValueError, match="before it is learnt"):
        metrics.forward_transfer(LOWER, B)


def test_one_task_has_no_transfer():
    got = metrics.summary([[0.5]], [0.1])
    assert got.pop("average") == got.pop("learning_accuracy") == 0.5
    assert all(math.isnan(value) for value in got.values())


def test_tasks_learnt_together():
    got = metrics.summary([[0.5, 0.7]])
    assert got.pop("average") == pytest.approx(0.6)
    assert all(math.isnan(value) for value in got.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tensors_and_lists(dtype):
    tensor = torch.tensor(A, dtype=dtype, requires_grad=True)
    assert metrics.summary(tensor, torch.tensor(B)) == pytest.approx(metrics.summary(A, B), rel=0.05)
    assert metrics.summary(A.tolist(), B.tolist()) == metrics.summary(A, B)
    assert all(type(value) is float for value in metrics.summary(A, B).values())


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2), (0, 0), (2, 2, 2)])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match="must be"):
        metrics.average(np.zeros(shape))


def test_a_hole_below_the_diagonal_is_named():
    broken = A.copy()
    broken[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"A\[2, 1\] is nan"):
        metrics.forgetting(broken)
    with pytest.raises(ValueError, match="one accuracy per task"):
        metrics.forward_transfer(A, B[:2])


def test_spread():
    assert metrics.spread([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, math.sqrt(7 / 3)))
    mean, std = metrics.spread([3.0])
    assert mean == 3.0
    assert math.isnan(std)
    with pytest.raises(ValueError, match="one value per seed"):
        metrics.spread([])


def test_paired_interval():
    rng = np.random.default_rng(3)
    a = rng.normal(size=200)
    b = a - 0.5 + 0.1 * rng.normal(size=200)
    low, high = metrics.paired_interval(a, b)
    assert low < (a - b).mean() < high
    assert high - low == pytest.approx(2 * 1.96 * (a - b).std(ddof=1) / math.sqrt(200), rel=0.1)
    assert metrics.paired_interval(a, b) == (low, high)
    assert metrics.paired_interval(a, b, seed=1) != (low, high)
    swapped = metrics.paired_interval(b, a)
    assert swapped == pytest.approx((-high, -low))
    assert metrics.paired_interval(a + 5, a) == pytest.approx((5, 5))
    assert all(math.isnan(x) for x in metrics.paired_interval([1.0], [2.0]))
    with pytest.raises(ValueError, match="paired"):
        metrics.paired_interval(a, b[:-1])
    with pytest.raises(ValueError, match="level"):
        metrics.paired_interval(a, b, level=95)


def test_wider_level_wider_interval():
    a, b = np.arange(10.0), np.zeros(10)
    narrow, wide = metrics.paired_interval(a, b, level=0.5), metrics.paired_interval(a, b, level=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_the_chance_of_so_many_hits_is_a_sum_over_all_outcomes() -> None:
    from itertools import product

    from selfless.metrics import chance_of_hits

    for hits in range(6):
        outcomes = [sum(tosses) for tosses in product((0, 0, 1), repeat=5)]  # each toss hits with probability 1/3
        assert chance_of_hits(hits, 5, 1 / 3) == pytest.approx(sum(total >= hits for total in outcomes) / 3**5)
    assert chance_of_hits(1200, 10_000, 0.1) < 1e-9


TABLE = {  # t with F(t) = p, from printed tables of Student's distribution
    (0.975, 1): 12.706,
    (0.975, 2): 4.303,
    (0.975, 3): 3.182,
    (0.975, 4): 2.776,
    (0.975, 9): 2.262,
    (0.975, 30): 2.042,
    (0.995, 4): 4.604,
    (0.95, 5): 2.015,
    (0.9995, 4): 8.610,
}


@pytest.mark.parametrize(("p", "dof"), TABLE)
def test_students_quantiles_are_the_tabulated_ones(p: float, dof: int) -> None:
    assert metrics.student_quantile(p, dof) == pytest.approx(TABLE[p, dof], abs=5e-4)
    assert metrics.student_quantile(1 - p, dof) == -metrics.student_quantile(p, dof)


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 7, 10, 29])
def test_students_distribution_is_the_integral_of_its_density(dof: int) -> None:
    x = np.linspace(0, 3, 20_001)
    constant = math.gamma((dof + 1) / 2) / (math.sqrt(dof * math.pi) * math.gamma(dof / 2))
    density = constant * (1 + x**2 / dof) ** (-(dof + 1) / 2)
    integral = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
    for i in range(0, len(x), 2_500):
        assert metrics.student_cdf(x[i], dof) == pytest.approx(0.5 + integral[i], abs=1e-8)
        assert metrics.student_cdf(-x[i], dof) == pytest.approx(0.5 - integral[i], abs=1e-8)
    assert (metrics.student_cdf(math.inf, dof), metrics.student_cdf(-math.inf, dof)) == (1.0, 0.0)


def test_a_far_tail_is_a_probability() -> None:
    """Sums of the series end 1e-16 above 1 or below; a p-value below 0 would stop the correction of a family."""
    tails = [metrics.student_cdf(-t, dof) for dof in range(1, 100) for t in (20.0, 35.0, 80.0, 1e6)]
    assert min(tails) >= 0.0
    assert max(metrics.student_cdf(t, dof) for dof in range(1, 100) for t in (20.0, 35.0, 80.0, 1e6)) <= 1.0
    assert metrics.holm(tails).max() <= 1.0


def test_the_t_interval_is_the_formula_and_covers_as_often_as_it_says() -> None:
    a, b = [5.0, 7.0, 6.0, 8.0, 4.0], [1.0, 2.0, 3.0, 2.0, 2.0]
    d = np.subtract(a, b)
    half = 2.776445 * d.std(ddof=1) / math.sqrt(5)
    assert metrics.paired_t_interval(a, b) == pytest.approx((d.mean() - half, d.mean() + half), rel=1e-6)
    rng = np.random.default_rng(0)
    samples = rng.normal(0.7, 1.0, size=(2000, 5))
    found = [metrics.paired_t_interval(x, np.zeros(5)) for x in samples]
    assert 0.935 < np.mean([low <= 0.7 <= high for low, high in found]) < 0.965  # of the bootstrap: 0.84
    assert all(math.isnan(x) for x in metrics.paired_t_interval([1.0], [2.0]))
    assert metrics.paired_t_interval([3.0, 4.0], [1.0, 2.0]) == (2.0, 2.0)


def test_p_values_agree_with_the_interval() -> None:
    """The margin lies at an end of the interval exactly if twice the smaller p-value is 1 − level."""
    a, b = [5.0, 7.0, 6.0, 8.0, 4.0], [1.0, 2.0, 3.0, 2.0, 2.0]
    for level in (0.9, 0.95, 0.99):
        low, high = metrics.paired_t_interval(a, b, level=level)
        assert 2 * metrics.paired_p_values(a, b, low)[0] == pytest.approx(1 - level)
        assert 2 * metrics.paired_p_values(a, b, high)[1] == pytest.approx(1 - level)
    above, below = metrics.paired_p_values(a, b, 1.0)
    assert above + below == pytest.approx(1)
    assert metrics.paired_p_values([1.0, 2.0], [0.0, 1.0], 0.5) == (0.0, 1.0)  # equal differences: nothing varies
    assert metrics.paired_p_values([1.0, 2.0], [0.0, 1.0], 1.0) == (1.0, 1.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_step_by_step(p: list[float]) -> None:
    """Slowly: take the smallest p while it is at most α divided by the number of tests that are left; stop at the first that is not."""
    adjusted = metrics.holm(p)
    for alpha in (0.01, 0.05, 0.3):
        left, rejected = sorted(range(len(p)), key=lambda i: p[i]), set()
        while left and p[left[0]] * len(left) <= alpha:
            rejected.add(left.pop(0))
        assert {i for i, q in enumerate(adjusted) if q <= alpha} == rejected
    assert (adjusted >= np.array(p)).all()


def test_the_number_of_seeds_that_decides_is_the_first() -> None:
    for gap, deviation in ((0.5, 0.4), (-1.0, 3.0), (2.0, 0.1), (0.3, 0.3)):
        slowly = next(n for n in range(2, 500) if abs(gap) > metrics.student_quantile(0.975, n - 1) * deviation / math.sqrt(n))
        assert metrics.seeds_to_decide(gap, deviation) == slowly
    assert metrics.seeds_to_decide(0.0, 1.0) is None
    assert metrics.seeds_to_decide(0.01, 1.0, most=100) is None
    assert metrics.seeds_to_decide(0.5, 0.4, level=0.999) > metrics.seeds_to_decide(0.5, 0.4)  # type: ignore[operator]
