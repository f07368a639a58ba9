"""Results into tables and pictures."""

import copy
import json
import re
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


PAGE = """# Title

<!-- table colocation-h100; cases graph+train -->
<!-- end -->

p99 is 0<!--=colocation-h100;graph+train;gpumux;latency_p99_ms--> ms, 9.99<!--=colocation-h100;graph+train;gpumux÷alone;latency_p99_ms--> times alone,
0%<!--=colocation-h100;graph+train;gpumux÷alone;batch_rate--> and 0.00<!--=colocation-h100;graph+train;gpumux−alone;latency_p99_ms-->.

![picture](bench/results/colocation-h100.svg)
"""


class Plot(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = Path(folder.name).resolve() / "bench" / "results"
        self.results.mkdir(parents=True)
        self.readme = self.results.parent.parent / "README.md"
        self.readme.write_text(PAGE)
        (self.results / "colocation-h100.json").write_text(json.dumps(DATA))

    def outputs(self) -> dict[Path, str]:
        return plot.outputs(self.results, [self.readme])[0]

    def write(self) -> str:
        for path, text in self.outputs().items():
            path.write_text(text)
        return self.readme.read_text()

    def filled(self, text: str) -> str:
        return plot.filled(plot.Store(self.results), self.readme, text, set())

    def test_writing_again_changes_nothing(self) -> None:
        once = self.write()
        self.assertEqual(self.write(), once)
        self.assertIn("| graph+train | gpumux | 1.500 | 12.15 | 1.20 | 0.90 |", once)
        self.assertIn("commit `0123456789ab`: `python3 bench/colocation.py`.", once)
        self.assertNotIn("start-up", once)

    def test_numbers_of_the_text_keep_their_decimals(self) -> None:
        text = " ".join(self.write().split("-->"))
        for number in ("p99 is 2<!--", "1.20<!--", "90%<!--", "0.25<!--"):
            self.assertIn(number, text)

    def test_least_and_most_of_several_cases(self) -> None:
        (self.results / "colocation-x.json").write_text(json.dumps(DATA | {"rows": [row("b", "gpumux", x=3.0), row("a", "gpumux", x=2.0)]}))
        self.assertIn("3.0<!--", self.filled("0.0<!--=max colocation-x;a,b;gpumux;x-->"))
        self.assertIn("2.0<!--", self.filled("0.0<!--=min colocation-x;*;gpumux;x-->"))
        with self.assertRaisesRegex(common.BenchError, "2 numbers"):
            self.filled("0.0<!--=colocation-x;*;gpumux;x-->")

    def test_a_source_that_is_not_there_is_an_error(self) -> None:
        for source in ("nothing;a;b;c", "colocation-h100;graph+train;mps;latency_p99_ms", "colocation-h100"):
            with self.assertRaises(common.BenchError, msg=source):
                self.filled(f"1.0<!--={source}-->")
        with self.assertRaisesRegex(common.BenchError, "no rows"):
            self.filled("<!-- table colocation-h100; modes mps -->\n<!-- end -->")

    def test_values_select_columns(self) -> None:
        found = plot.selected({"bench": "b", "rows": [{"case": "a", "mode": "m", "values": {"x": 1, "y": 2}}, {"case": "a", "mode": "n", "values": {"y": 3}}]}, ["values x"])
        self.assertEqual(found, [{"case": "a", "mode": "m", "values": {"x": 1}}])

    def test_curves_are_drawn_a_line_a_program(self) -> None:
        rows = [{"case": case, "mode": f"{part}%", "values": {"relative": part / 100}} for case in "ab" for part in (25, 50, 100)]
        drawn = plot.picture({"bench": "curves", "device": "G", "commit": "0" * 7, "rows": rows}) or ""
        self.assertEqual((drawn.count('stroke-width="2"'), drawn.count("<circle")), (2, 6))
        # Of half of the SMs half of the throughput: in the middle of the panel, whose scale goes to 1.1.
        self.assertIn('cx="202.0" cy="207.6"', drawn)

    def figured(self, text: str) -> str:
        self.readme.write_text(f"<!-- figure fig; {text} -->\n![x](img/fig.svg)\n<!-- table colocation-h100 -->\n<!-- end -->\n")
        return self.outputs()[self.readme.parent / "img" / "fig.svg"]

    def test_figure_has_the_bars_of_its_cases_with_their_calls(self) -> None:
        drawn = self.figured("bars latency_p99_added_us,latency_p99_rel; modes gpumux;\ncolocation-h100 graph+train; colocation-h100 graph+train")
        self.assertEqual(drawn.count("graph+train (&lt;H100&gt;, 0123456)"), 1)
        self.assertEqual(drawn.count(">250<"), 2, "µs more than alone")
        for wrong in ("colocation-h100 nothing", "nothing graph+train"):
            with self.assertRaises(common.BenchError):
                self.figured(f"bars batch_rate; modes gpumux; {wrong}")

    def test_relative_bars_are_cut(self) -> None:
        rows = [row("a", "mps", x_rel=3000.0) | {"interval": {"x_rel": [2000, 4000]}}, row("a", "gpumux", x_rel=1.0)]
        drawn = plot.bar_panels("", rows, ["x_rel"])
        self.assertIn('width="280.0"', drawn)
        self.assertIn('width="28.0"', drawn)
        self.assertIn(">3000<", drawn)

    def test_lines_go_by_the_cases_number(self) -> None:
        rows = [row(f"A@prep{at}", "gpumux", batch_rate=10.0 + at) | {"interval": {"batch_rate": [9.0, 12.0 + at]}} for at in (0, 50)]
        (self.results / "colocation-h100.json").write_text(json.dumps(DATA | {"rows": [*DATA["rows"], *rows]}))
        drawn = self.figured("lines batch_rate by preparation (µs); modes gpumux; colocation-h100 A@prep0,A@prep50")
        self.assertEqual((drawn.count("<circle"), drawn.count(">preparation (µs)<")), (2, 1))
        self.assertIn('cx="352.0"', drawn, "the last one is at the right")

    def test_lines_of_a_series_have_gaps_where_seconds_are_missing(self) -> None:
        def drawn(**over: float) -> str:
            rows = [row("1x+train", mode, gpu_busy=0.5) | {"series": {"gpu_busy": over}} for mode in ("alone", "gpumux")]
            (self.results / "colocation-h100.json").write_text(json.dumps(DATA | {"rows": [*DATA["rows"], *rows]}))
            return self.figured("lines gpu_busy by second of the trace; modes alone,gpumux; colocation-h100 1x+train")

        whole = drawn(**{"0": 0.25, "1": 0.5, "10": 1.0, "2": 1.0})
        lines = re.findall(r'<path d="(M[^"]*)" fill="none" stroke="(#\w+)"', whole)
        self.assertEqual([colour for _, colour in lines], [plot.COLOURS["alone"], plot.COLOURS["gpumux"]])
        self.assertEqual([re.sub(r"[^ML]", "", path) for path, _ in lines], ["MLLM"] * 2)
        self.assertIn("M352.0 71.3", lines[0][0], "the last second is at the right, busy at 1 of 1.1")
        self.assertNotIn("<circle", whole)
        self.assertNotEqual(drawn(**{"0": 0.5, "1": 0.5, "10": 1.0, "2": 1.0}), whole)

    def test_figure_that_no_page_shows_is_an_error(self) -> None:
        self.readme.write_text("<!-- figure fig; bars batch_rate; modes gpumux; colocation-h100 graph+train -->\n")
        with self.assertRaisesRegex(common.BenchError, "does not show"):
            self.outputs()

    def test_tables_without_intervals_are_listed_by_section(self) -> None:
        def saved(name: str, note: str = "", **cases: bool) -> None:
            rows = [row(case, "gpumux", x=2.0) | ({"interval": {"x": [1, 3]}} if within else {}) for case, within in cases.items()]
            (self.results / f"{name}.json").write_text(json.dumps(DATA | {"rows": rows, "note": note}))

        saved("a-x", a=False)
        saved("b-x", a=True, b=False)
        saved("c-x", "Each value is the best of several runs.", a=True)
        saved("d-x", a=True)
        tables = {name: f"<!-- table {name}-x -->\n<!-- end -->\n" for name in "abcd"}
        page = f"## One's?\n{tables['a']}{tables['b']}\n## Two\n{tables['c']}{tables['d']}\n<!-- not in rounds -->\n<!-- end -->\n"
        listed = self.filled(page).partition("<!-- not in rounds -->\n")[2]
        self.assertEqual(listed, "- [One's?](#ones): `a-x`, `b-x` (b)\n- [Two](#two): `c-x` (best of several)\n<!-- end -->\n")

    def test_results_without_a_table_are_found(self) -> None:
        (self.results / "kernels-h100.json").write_text(json.dumps(DATA | {"bench": "kernels"}))
        self.assertEqual(plot.outputs(self.results, [self.readme])[1], ["kernels-h100"])

    def test_case_that_was_asked_for_has_a_row_or_a_word(self) -> None:
        call = {"command": "python3 bench/x.py --cases a,'b c' --modes alone,gpumux", "rows": [{"case": "a", "mode": "alone"}]}
        self.assertEqual(plot.unexplained(call), ["b c", "gpumux"])
        self.assertEqual(plot.unexplained({"command": "x --cases C", "rows": [], "note": "a call"}), ["C"])
        self.assertEqual(plot.unexplained(call | {"note": "The call ended before b c. Gpumux failed."}), [])

    def test_new_numbers_make_the_files_stale(self) -> None:
        self.write()
        data = copy.deepcopy(DATA)
        data["rows"][1]["values"]["latency_p99_ms"] = 9.0  # type: ignore[index]
        (self.results / "colocation-h100.json").write_text(json.dumps(data))
        changed = [path.name for path, text in self.outputs().items() if path.read_text() != text]
        self.assertEqual(sorted(changed), ["README.md", "colocation-h100.svg"])

    def test_measured_numbers_need_a_source(self) -> None:
        for text in (
            "On an H100 it takes 12 µs.",
            "| how | p99 |\n|---|---|\n| fast | 12 µs |",
            "Measured on a quiet machine:\n\n- it takes 12 µs",
            "It was measured: 1.0<!--=a;b;c;d-->, then 12.",
            "On an H100 it takes `12`.",
            "On an H100 it takes `12 µs` or `12us` or `~12 ms`, at `12 GB/s`, `p99 12 ms`, `12x`, `12×`, `12%`, `12 tokens/s`, `12 GiB`, `12 s`, 12ms, 12× and 12x.",
            "On an H100 it takes `1 ms`<!--set=x-->, `12`, and by `--for 13` 12.",
            "On an H100 it takes `≈12`, `12 to 12`, `12–12`, `12 ± 12`, `12 percent` and `12 times` as long.",
            "On an H100 it takes 12 µs. <!--cited-->",
            "[A paper](https://example.org) says so of an H100: 12.",
        ):
            found = [number for _, number in plot.unsourced(text)]
            self.assertEqual(found, ["12"] * len(re.findall(r"(?<!\.)\b12", text)), text)
        for text in (
            "A turn is 50 ms.",
            "On an H100 (driver 580.159, 2026-11-22) ResNet-50 takes `12 µs`<!--set=x-->, by `prep12`, `--for 12s`, `a=12 ms`, `2x12%`, `12ab34c` and `10ms/prep12`.",
            "| A100 | 2.4% | [paper](https://example.org) <!--cited--> |",
            "```\nH100 12\n```",
            "<!-- table x -->\n| H100 | 12 |\n<!-- end -->",
        ):
            self.assertEqual(plot.unsourced(text), [], text)
        self.assertEqual(plot.unsourced("one\n\nOn an H100\nit takes 12.\n"), [(4, "12")])
        self.assertEqual(plot.unsourced("On an H100 it takes\n3.5 GiB,\n*not* 4.\n"), [(2, "3.5"), (3, "4")], "no list items")

    def test_settings_stand_where_they_are_said_to(self) -> None:
        (self.results / "colocation-h100.json").write_text(json.dumps(DATA | {"command": "x --batch 32", "note": "of 1024 bytes"}))
        (self.readme.parent / "limits.py").write_text("MOST = 3_000\nWAIT_S = 0.5\n")
        store = plot.Store(self.results)
        for text in ("`32`<!--set=colocation-h100-->", "`1,024 B`<!--set=colocation-h100-->", "`3000`<!--set=limits.py-->", "`0.5 s`<!--set=limits.py-->", "`3 s`<!--set=limits.py-->"):
            self.assertEqual(plot.not_set(store, self.readme.parent, text), [], text)
        for text in ("`3`<!--set=colocation-h100-->", "`4 s`<!--set=limits.py-->", "`2 ms`<!--set=colocation-h100-->", "`5 s`<!--set=limits.py-->", "`0.52`<!--set=limits.py-->", "`32`<!--set=nothing-->"):
            self.assertEqual(len(plot.not_set(store, self.readme.parent, text)), 1, text)

    def test_calls_stand_side_by_side_with_their_commits(self) -> None:
        (self.results / "colocation-y.json").write_text(json.dumps(DATA | {"commit": "abcdef0123"}))
        text = self.filled("<!-- runs latency_p99_ms; gpumux÷alone; colocation-h100 colocation-y -->\n<!-- end -->")
        self.assertIn("| latency p99 (ms), gpumux÷alone | `0123456` | `abcdef0` |", text)
        self.assertIn("| graph+train | 1.20 | 1.20 |", text)

    def test_intervals_and_samples_are_shown(self) -> None:
        rows = [row("a", "gpumux", latency_p99_ms=2.0) | {"interval": {"latency_p99_ms": [1.5, 2.5]}, "samples": 7}]
        self.assertIn("| a | gpumux | 2 (1.500–2.500) | 7 |", plot.table(rows))
        rows = [row("a", "alone", x=1.0) | {"rounds": 6}, row("a", "gpumux", x=2.0) | {"rounds": 5, "ended": "interval"}]
        self.assertIn("| case | mode | x | rounds | ended |", plot.table(rows))
        self.assertIn("| a | alone | 1 | 6 |  |\n| a | gpumux | 2 | 5 | interval |", plot.table(rows))

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

    def test_titles_say_the_unit(self) -> None:
        for name, expected in {
            "latency_p999_ms": "latency p99.9 (ms)",
            "launch_p50_us": "launch p50 (µs)",
            "launches_per_s": "launches/s",
            "batch_rate": "batch rate (1/s)",
            "failures": "failures",
        }.items():
            self.assertEqual(plot.title(name), expected)
