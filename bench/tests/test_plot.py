"""Results into tables and pictures."""

import copy
import json
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import common
import plot


def row(case: str, mode: str, **values: float) -> dict[str, object]:
    return {"case": case, "mode": mode, "values": values}


DATA = {
    "bench": "colocation",
    "device": "NVIDIA <H100>",
    "driver": "580.1",
    "date": "2026-01-02",
    "commit": "0123456789abcdef",
    "command": "python3 bench/colocation.py",
    "rows": [
        row("graph+train", "alone", latency_p99_ms=1.25, batch_rate=13.5),
        row("graph+train", "gpumux", latency_p99_ms=1.5, batch_rate=12.15),
        row("start-up", "gpumux", added_p50_ms=3.0),
    ],
}


class Plot(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = Path(folder.name).resolve() / "bench" / "results"
        self.results.mkdir(parents=True)
        self.readme = self.results.parent.parent / "README.md"
        self.readme.write_text(f"# Title\n\n{plot.BEGIN}\n{plot.END}\n\nthe end\n")
        (self.results / "colocation-h100.json").write_text(json.dumps(DATA))

    def write(self) -> None:
        for path, text in plot.outputs(self.results, self.readme).items():
            path.write_text(text)

    def test_writing_again_changes_nothing(self) -> None:
        self.write()
        once = self.readme.read_text()
        self.write()
        self.assertEqual(self.readme.read_text(), once)
        self.assertTrue(once.startswith("# Title\n") and once.endswith("the end\n"))
        self.assertIn("![colocation on NVIDIA <H100>](bench/results/colocation-h100.svg)", once)

    def test_only_what_tells_most_is_in_the_readme(self) -> None:
        rest = self.results.parent.parent / "docs" / "results.md"
        rest.parent.mkdir()
        rest.write_text(f"{plot.BEGIN}\n{plot.END}\n")
        (self.results / "kernels-h100.json").write_text(json.dumps(DATA | {"bench": "kernels"}))
        files = plot.outputs(self.results, self.readme, rest)
        self.assertIn("### colocation:", files[self.readme])
        self.assertNotIn("### kernels:", files[self.readme])
        self.assertIn("![kernels on NVIDIA <H100>](../bench/results/kernels-h100.svg)", files[rest])

    def test_without_results_the_block_is_empty(self) -> None:
        self.write()
        (self.results / "colocation-h100.json").unlink()
        self.write()
        self.assertIn(f"{plot.BEGIN}\n{plot.END}", self.readme.read_text())

    def test_ratios_are_to_the_same_case_alone(self) -> None:
        text = plot.section(DATA)
        self.assertIn("| graph+train | gpumux | 1.500 | 12.15 | 1.20 | 0.90 |", text)
        self.assertIn("| case | mode | added p50 (ms) |", text)

    def test_new_numbers_make_the_files_stale(self) -> None:
        self.write()
        data = copy.deepcopy(DATA)
        data["rows"][1]["values"]["latency_p99_ms"] = 9.0  # type: ignore[index]
        (self.results / "colocation-h100.json").write_text(json.dumps(data))
        changed = [p.name for p, text in plot.outputs(self.results, self.readme).items() if p.read_text() != text]
        self.assertEqual(sorted(changed), ["README.md", "colocation-h100.svg"])

    def test_picture_is_well_formed_and_true_to_scale(self) -> None:
        svg = ElementTree.fromstring(plot.picture(DATA) or "")
        widths = [
            float(bar.attrib["width"])
            for bar in svg.iter("{http://www.w3.org/2000/svg}rect")
            if bar.attrib["fill"] in plot.COLOURS.values()
        ]
        self.assertEqual(len(widths), 4)
        self.assertAlmostEqual(widths[0] / widths[1], 1.25 / 1.5, places=2)
        self.assertIsNone(plot.picture(DATA | {"rows": DATA["rows"][2:]}))

    def test_a_readme_without_the_marks_is_refused(self) -> None:
        self.readme.write_text("nothing here")
        with self.assertRaises(common.BenchError):
            plot.outputs(self.results, self.readme)

    def test_titles_say_the_unit(self) -> None:
        for name, expected in {
            "latency_p999_ms": "latency p99.9 (ms)",
            "launch_p50_us": "launch p50 (µs)",
            "launches_per_s": "launches/s",
            "batch_rate": "batch rate (1/s)",
            "failures": "failures",
        }.items():
            self.assertEqual(plot.title(name), expected)


if __name__ == "__main__":
    unittest.main()
