"""The algorithms of workloads Y and Z, on NumPy's arrays."""

import math
import random
import unittest

import algorithms

try:
    import numpy as np
except ImportError:
    np = None


@unittest.skipIf(np is None, "SKIPPED: no NumPy")
class WeatherModel(unittest.TestCase):
    def make(self) -> algorithms.Weather:
        column = lambda values: np.array(values).reshape(-1, 1)  # noqa: E731
        return algorithms.Weather(32, 64, column, np.zeros, np.concatenate)

    def test_bubble_rises_and_nothing_is_lost(self) -> None:
        weather = self.make()
        heat = weather.state[algorithms.RHO_THETA].sum()
        heights = np.arange(32).reshape(-1, 1)
        centre = lambda: (weather.state[algorithms.RHO_THETA] * heights).sum() / weather.state[algorithms.RHO_THETA].sum()  # noqa: E731
        before = centre()
        for _ in range(300):
            weather.step()
        self.assertTrue(np.isfinite(weather.state).all())
        self.assertGreater(weather.state[algorithms.W].max(), 1.0)
        self.assertGreater(centre(), before)
        # Mass to rounding (the air's own is about 1 a cell); the scheme lets heat, but no mass, diffuse at walls.
        self.assertLess(abs(weather.state[algorithms.DENSITY].sum()), 1e-9 * 32 * 64)
        self.assertLess(abs(weather.state[algorithms.RHO_THETA].sum() - heat), 1e-3 * heat)

    def test_air_at_rest_stays_at_rest(self) -> None:
        weather = self.make()
        weather.state[...] = 0.0
        for _ in range(50):
            weather.step()
        self.assertLess(np.abs(weather.state[algorithms.W]).max(), 0.05)

    def test_picture_stays_symmetric(self) -> None:
        weather = self.make()
        for _ in range(100):
            weather.step()
        warm = weather.state[algorithms.RHO_THETA]
        self.assertLess(np.abs(warm - warm[:, ::-1]).max(), 1e-6 * np.abs(warm).max())


@unittest.skipIf(np is None, "SKIPPED: no NumPy")
class Graphs(unittest.TestCase):
    def setUp(self) -> None:
        rng = random.Random(2)
        weights = algorithms.power_law_weights(60)
        ends = [rng.choices(range(60), weights, k=2) for _ in range(70)]
        self.lengths = np.array([rng.randrange(1, 10) for _ in ends] * 2, dtype=float)
        self.source, self.target = (np.array([it[at] for it in ends] + [it[1 - at] for it in ends]) for at in (0, 1))

    @staticmethod
    def least(value: "np.ndarray", at: "np.ndarray", candidates: "np.ndarray") -> "np.ndarray":
        new = value.copy()
        np.minimum.at(new, at, candidates)
        return new

    def exact(self, lengths: "np.ndarray") -> list[float]:
        """Distances from node 0, by taking the nearest node again and again."""
        found, done = {0: 0.0}, dict[int, float]()
        while found:
            node = min(found, key=lambda it: found[it])
            done[node] = found.pop(node)
            for source, target, length in zip(self.source, self.target, lengths):
                if source == node and target not in done:
                    found[target] = min(found.get(target, math.inf), done[node] + length)
        return [done.get(node, math.inf) for node in range(60)]

    def test_distances_and_levels_are_the_shortest(self) -> None:
        first = np.full(60, math.inf)
        first[0] = 0.0
        for lengths in (self.lengths, np.ones_like(self.lengths)):
            found = algorithms.distances(first, self.source, self.target, lengths, self.least, np.array_equal)
            self.assertEqual(found.tolist(), self.exact(lengths))

    def test_components_are_what_can_be_reached(self) -> None:
        found = algorithms.components(np.arange(60.0), self.source, self.target, self.least, np.array_equal)
        reached = [math.isfinite(it) for it in self.exact(self.lengths)]
        self.assertEqual([it == 0 for it in found], reached)
        self.assertTrue(all(found[a] == found[b] for a, b in zip(self.source, self.target)))
        self.assertGreater(len(set(found)), 1)

    def test_ranks_sum_to_one_and_do_not_move(self) -> None:
        # A node without edges would keep its rank to itself.
        source, target = np.append(self.source, np.arange(60)), np.append(self.target, np.arange(60))
        degree = np.bincount(source, minlength=60).astype(float)
        total = lambda at, values: np.bincount(at, values, minlength=60)  # noqa: E731
        found = algorithms.ranks(np.full(60, 1 / 60), source, target, degree, total, tolerance=1e-10)
        self.assertAlmostEqual(found.sum(), 1.0)
        again = total(target, (found / degree)[source]) * 0.85 + 0.15 / 60
        self.assertLess(np.abs(again - found).sum(), 1e-9)
        self.assertGreater(found[0], found[50])


class Degrees(unittest.TestCase):
    def test_degrees_have_the_power_law(self) -> None:
        weights = algorithms.power_law_weights(10_000, 2.5)
        # Of a law with exponent 2.5, ten times the degree is 10 ** 1.5 times as rare.
        over = lambda limit: sum(it > limit for it in weights)  # noqa: E731
        self.assertAlmostEqual(over(0.01) / over(0.1), 10**1.5, delta=2)
