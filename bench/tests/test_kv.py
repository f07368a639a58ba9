"""Tests of the elastic memory benchmark's own logic; no GPU needed."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kv  # noqa: E402
import kv_worker  # noqa: E402


class Cases(unittest.TestCase):
    def test_parts_are_all_there(self) -> None:
        self.assertEqual(set(kv.PARTS), set(kv.RUN))

    def test_sizes_are_read(self) -> None:
        self.assertEqual((kv.bytes_of("20GiB"), kv.bytes_of("64MiB")), (20 << 30, 64 << 20))
        self.assertTrue(all(kv.bytes_of(case) % (2 << 20) == 0 for case in kv.PARTS["granules"][0]))

    def test_orders_are_methods_of_the_worker(self) -> None:
        for order in ("granules", "fill", "get", "release", "verify", "shuffle", "lock", "work"):
            self.assertTrue(callable(getattr(kv_worker.Worker, order)))


if __name__ == "__main__":
    unittest.main()
