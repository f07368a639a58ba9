"""Reading of predictions and measurements, and that every row has both."""

import unittest

import calibration
import common


class Sides(unittest.TestCase):
    def test_both_speak_of_the_same(self) -> None:
        tenant = {"rate": 50.0, "received": 0.5, "latency": {"p50_ms": 2.0, "p99_ms": 3.0}}
        alone = {"rate": 100.0, "received": 1.0, "latency": {"p50_ms": 1.0, "p99_ms": 1.0}}
        modes = {"alone": {"tenants": [alone, alone]}, "gpumux": {"tenants": [tenant, tenant]}}
        predicted = calibration.Predicted(modes)
        measured = calibration.Measured(
            {
                "alone": {"latency_p50_ms": 1.0, "batch_rate": 10.0},
                "gpumux": {"latency_p50_ms": 2.0, "batch_rate": 5.0},
            }
        )
        for side in (predicted, measured):
            self.assertEqual(side.latency("gpumux", "p50"), 2000)
            self.assertEqual(side.added("gpumux", "p50"), 1000)
            self.assertEqual(side.slower("gpumux", "p50"), 2)
        self.assertEqual((predicted.total("gpumux", 1), measured.total("gpumux")), (0.5, 0.5))
        self.assertEqual(predicted.share("gpumux"), 0.5)

    def test_every_row_has_a_scenario_and_a_measurement(self) -> None:
        for row in calibration.ROWS:
            self.assertTrue((calibration.SCENARIOS / f"{row.scenario}.toml").exists(), row.scenario)
            measured = calibration.measurements(calibration.results(common.BENCH / "results", row.bench), row.case)
            self.assertGreater(abs(row.measured(measured)), 0, row)
