"""The driver of the fleet's replay, without the trace."""

import tempfile
import unittest
from pathlib import Path

import fleet

HEAD = "workload,sc_policy,tune,seed,100,130\n"


class Fleet(unittest.TestCase):
    def test_published_results_are_means_over_seeds(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            for what, rows in (("allo", "90,94"), ("frag", "8,")):
                path = Path(name) / fleet.EXPECTED.format(what)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(HEAD + f"openb_pod_list_x,06-FGD,1.3,42,{rows}\nopenb_pod_list_x,06-FGD,1.3,43,92,96\n")
            own = fleet.published(Path(name))
        self.assertEqual(own, {("x", "fgd"): {"allocated_100": 91, "allocated_130": 95, "fragments_100": 50, "fragments_130": 96}})

    def test_rows_stand_beside_the_published_ones(self) -> None:
        run = {"points": [{"arrived": at, "allocated": at / 2, "fragments": 1.0} for at in (100, 130)]}
        found = {"fgd": fleet.means([run, run]), "gpumux": fleet.means([run, run])}
        rows = fleet.rows_of("x", found, {("x", "fgd"): {"allocated_130": 65.0}}, 2)
        self.assertEqual([row["mode"] for row in rows], ["fgd", "fgd-published", "gpumux"])
        self.assertEqual(rows[0]["values"]["allocated_130"], 65)
        self.assertEqual(rows[0]["interval"]["allocated_130"], [65, 65])

    def test_sizes_are_means_with_the_largest_first(self) -> None:
        need = {"gpus": 10, "attained": 100.0, "best_effort": [[50.0, 80.0]]}
        rows = fleet.size_rows({"a": [need, need | {"gpus": 12}], "b": [need | {"gpus": 20}] * 2}, 2)
        self.assertEqual([(row["mode"], row["values"]["gpus"]) for row in rows], [("b", 20), ("a", 11)])
        self.assertEqual(rows[1]["values"]["best_effort_rate_at_50"], 80)

    def test_file_with_another_checksum_is_not_taken(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "nodes.csv"
            path.write_text("other")
            self.assertFalse(fleet.checked(path, fleet.NODES))


if __name__ == "__main__":
    unittest.main()
