"""What guarantees.py makes of reports."""

import os
import unittest
from unittest import mock

import common
import guarantees
from guarantees import Tenant


def report(*per_second: int, **more: float) -> dict[str, object]:
    return {"per_second": list(per_second), "p50_us": 1.0, "p99_us": 2.0, **more}


class Values(unittest.TestCase):
    def test_lag_is_the_largest_shortfall_of_any_interval(self) -> None:
        total = [100.0] * 6
        self.assertEqual(guarantees.lag_us([50, 50, 50, 50, 50, 50], total, 0.5), 0)
        self.assertEqual(guarantees.lag_us([90, 20, 30, 80, 10, 90], total, 0.5), 60, "30 + 20 - 30 + 40")
        self.assertEqual(guarantees.lag_us([0, 0, 0, 0, 0, 0], total, 0.5), 300)

    def test_shares_count_each_call_by_its_work_and_leave_out_the_first_second(self) -> None:
        tenants = [Tenant("light", "latency", 0.1), Tenant("busy", "latency", 0.4), Tenant("batch", "batch", 0.3)]
        found = [report(0, 200, 200), report(9, 580, 480), report(9, 200, 250)]
        values = guarantees.evaluate(tenants, found, guaranteed=True)
        self.assertEqual(values["total_rel"], 1.0)
        self.assertEqual((values["share_2"], values["share_3"]), (0.53, 0.45))
        self.assertEqual((values["guarantee_2"], values["lag_2_ms"], values["lag_3_ms"]), (0.4, 0.0, 0.0))
        self.assertEqual((values["latency_p50_us"], values["latency_p99_us"]), (1.0, 2.0))
        self.assertNotIn("share_1", values)
        self.assertNotIn("lag_2_ms", guarantees.evaluate(tenants, found, guaranteed=False))

    def test_devices_are_counted_apart(self) -> None:
        tenants = guarantees.CASES["two-gpus"]
        values = guarantees.evaluate(tenants, [report(0, 300, 300), report(0, 200, 200), report(0, 100, 100), report(0, 400, 400)], guaranteed=True)
        self.assertEqual([values[f"share_{at}"] for at in (1, 2, 3, 4)], [0.6, 0.4, 0.2, 0.8])
        self.assertEqual((values["total_rel"], values["lag_1_ms"], values["lag_3_ms"]), (1.0, 0.0, 200.0))

    def test_devices_are_those_that_the_user_chose(self) -> None:
        for given, expected in (("", ["0", "1"]), ("GPU-b,GPU-a,GPU-c", ["GPU-b", "GPU-a"])):
            with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=given):
                found = [it.environment()["CUDA_VISIBLE_DEVICES"] for it in guarantees.CASES["two-gpus"][::2]]
                self.assertEqual(found, expected)
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="GPU-b"), self.assertRaisesRegex(common.BenchError, "2 GPUs are needed"):
            guarantees.CASES["two-gpus"][0].environment()

    def test_too_short_a_run_is_no_measurement(self) -> None:
        with self.assertRaisesRegex(common.BenchError, "full seconds"):
            guarantees.evaluate(guarantees.CASES["pausing"], [report(1, 2), report(1, 2)], guaranteed=True)

    def test_rounds_are_summed_up_with_intervals_and_the_worst_lag(self) -> None:
        found = [{"share_2": share, "lag_2_ms": lag} for share, lag in [(0.4, 1.0), (0.5, 9.0), (0.6, 2.0), (0.5, 0.0), (0.5, 0.0)]]
        values, around = guarantees.summed_up(found)
        self.assertEqual((values["share_2"], values["lag_2_ms"]), (0.5, 9.0))
        low, high = around["share_2"]
        self.assertTrue(0.4 <= low < 0.5 < high <= 0.6)
        self.assertEqual(list(around), ["share_2"])
        self.assertEqual(guarantees.summed_up(found[:4])[1], {})

    def test_a_lag_above_its_bound_is_found(self) -> None:
        self.assertEqual(guarantees.above({"lag_2_ms": 9.0, "bound_2_ms": 8.0, "lag_3_ms": 1.0, "bound_3_ms": 8.0, "share_2": 0.5}), ["lag_2_ms 9 of at most 8"])
        self.assertEqual(guarantees.above({"share_2": 0.5}), [])

    def test_guarantees_of_a_case_can_be_admitted(self) -> None:
        for case, tenants in guarantees.CASES.items():
            for device in {it.device for it in tenants}:
                self.assertLessEqual(sum(it.guaranteed for it in tenants if it.device == device), 0.8001, case)
