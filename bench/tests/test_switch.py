"""The parts of a request, from stamps."""

from __future__ import annotations

import unittest

import common
import switch

US = 1_000
AHEAD = 5_000_000


class Switch(unittest.TestCase):
    """`parts`, `offset` and `cell`."""

    def test_clock_is_found_by_the_quickest_end(self) -> None:
        exact = [[n * US, n * US + AHEAD + 4 * US, n * US + AHEAD + 6 * US, (n + 6) * US] for n in range(10)]
        late = [[n * US, n * US + AHEAD + 4 * US, n * US + AHEAD + 6 * US, (n + 100) * US] for n in range(30)]
        # A neighbour delays what is before the first instruction, of all.
        met = [[(n - 150) * US, *rest] for n, (_, *rest) in enumerate(late)]
        self.assertEqual(switch.offset(exact + late + met), AHEAD)

    def test_request_that_preempts_has_five_parts(self) -> None:
        device = AHEAD + 1_000 * US
        request = [1_000 * US, device + 190 * US, device + 490 * US, 1_500 * US]
        ran = [[device - 900 * US, device + 40 * US], [device + 600 * US, device + 700 * US]]
        found = switch.parts(request, AHEAD, ran)
        self.assertEqual(found, switch.Parts(190.0, 300.0, 10.0, 40.0, 150.0))

    def test_request_that_finds_the_device_idle_met_no_neighbour(self) -> None:
        device = AHEAD + 1_000 * US
        request = [1_000 * US, device + 6 * US, device + 306 * US, 1_320 * US]
        for ran in ([], [[device - 900 * US, device - 1 * US]], [[device + 400 * US, device + 500 * US]]):
            found = switch.parts(request, AHEAD, ran)
            self.assertIsNone(found.stopped)
            self.assertEqual(found[:3], (6.0, 300.0, 14.0))

    def test_cell_has_medians_of_those_that_preempted(self) -> None:
        compared = [[0, AHEAD + 4 * US, AHEAD + 10 * US, 10 * US]]
        requests = [[at, at + AHEAD + 200 * US, at + AHEAD + 500 * US, at + 510 * US] for at in (0, 3_000 * US)]
        ran = [[AHEAD - 1_000 * US, AHEAD + 50 * US]]
        made = switch.cell({"compared": compared, "requests": requests}, {"ran": ran})
        self.assertEqual(made["rates"], {"met": 0.5, "stopped_ms": 0.05, "switch_ms": 0.15})
        self.assertEqual(made["more_ms"]["kernel"], [0.3, 0.3])
        alone = switch.cell({"compared": compared, "requests": requests}, None)
        self.assertEqual(alone["rates"], {})

    def test_clocks_that_were_compared_wrongly_are_an_error(self) -> None:
        # The comparison met the neighbour: the device's clock seems 0.15 ms later than it is.
        compared = [[0, AHEAD + 154 * US, AHEAD + 156 * US, 10 * US]]
        requests = [[0, AHEAD + 170 * US, AHEAD + 470 * US, 480 * US]]
        with self.assertRaisesRegex(common.BenchError, "clocks"):
            switch.cell({"compared": compared, "requests": requests}, {"ran": []})

    def test_every_mode_names_a_neighbour(self) -> None:
        self.assertLess(set(switch.DEFAULT_MODES), set(switch.MODES))
        for name in switch.DEFAULT_MODES[1:]:
            self.assertIn(switch.NEIGHBOURS[name][1], switch.LENGTHS_US)
