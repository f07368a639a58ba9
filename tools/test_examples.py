"""Tests of the check of examples."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from examples import misfits, names  # noqa: E402

SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "count": {"type": "integer", "minimum": 1},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "port": {"x-kubernetes-int-or-string": True},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "items": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
}


class Schema(unittest.TestCase):
    def test_fitting_value_has_no_misfits(self) -> None:
        value = {"name": "it", "count": 2, "kind": "a", "port": "http", "labels": {"x": "y"}, "free": {"z": [1]}, "items": [{"x": 1.5}]}
        self.assertEqual(list(misfits(value, SCHEMA)), [])

    def test_each_misfit_is_named(self) -> None:
        for value, part in (
            ({}, ".name is missing"),
            ({"name": "It"}, "does not match"),
            ({"name": "it", "count": "2"}, "'2' is no integer"),
            ({"name": "it", "count": True}, "True is no integer"),
            ({"name": "it", "count": 0}, "bounds"),
            ({"name": "it", "kind": "c"}, "none of"),
            ({"name": "it", "port": 1.5}, "neither"),
            ({"name": "it", "labels": {"x": 1}}, ".labels.x: 1 is no string"),
            ({"name": "it", "items": [{"x": 1}, {"y": 1}]}, ".items[1].y is unknown"),
        ):
            found = list(misfits(value, SCHEMA))
            self.assertTrue(len(found) == 1 and part in found[0], f"{value}: {found}")

    def test_names_of_parameters_are_of_all_depths(self) -> None:
        self.assertEqual(list(names({"a": {"b": {"c": 1}}, "d": 2})), ["a", "b", "c", "d"])


if __name__ == "__main__":
    unittest.main()
