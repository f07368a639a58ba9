"""The driver of the fleet's replay, without the trace."""

import pickle
import sys
import tempfile
import types
import unittest
from pathlib import Path

import fleet
import fleet_traces as traces

HEAD = "workload,sc_policy,tune,seed,100,130\n"


class Fleet(unittest.TestCase):
    def test_published_results_are_means_over_seeds(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            for what, rows in (("allo", "90,94"), ("frag", "8,")):
                path = Path(name) / traces.EXPECTED.format(what)
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
        rows = fleet.size_rows("x", {"a": [need, need | {"gpus": 12}], "b": [need | {"gpus": 20}] * 2}, 2)
        self.assertEqual([(row["mode"], row["values"]["gpus"]) for row in rows], [("b", 20), ("a", 11)])
        self.assertEqual(rows[1]["values"]["best_effort_rate_at_50"], 80)

    def test_changed_file_changes_the_checksum_of_its_set(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "a").write_text("1")
            before = traces.checksum(folder, ["a", "b"])
            (folder / "b").write_text("2")
            self.assertNotEqual(traces.checksum(folder, ["a", "b"]), before)

    def test_longest_wait_is_left_out_if_a_tenant_never_ran(self) -> None:
        need = {"gpus": 10, "waited": 0.5, "attained": 100.0, "longest_wait_s": 7}
        rows = fleet.lifetimes_rows("x", {"a": [need, need | {"longest_wait_s": None}], "b": [need | {"gpus": 20}]}, 2)
        self.assertEqual([(row["mode"], row["values"].get("longest_wait_s")) for row in rows], [("b", 7), ("a", None)])

    def test_published_and_estimated_rates_stand_below_the_simulated(self) -> None:
        way = {"sharing": "fgd", "gpus": 32, "asked": 16.84, "asked_memory": 20.0, "served": 100.0}
        rows = fleet.serving_rows("47/s", [way], {"flexsm": 97.9}, {"flexsm": 80.2, "temporal": 67.3})
        modes = ["fgd", "muxserve-estimated", "muxserve-published", "muxserve-turns-published"]
        self.assertEqual([row["mode"] for row in rows], modes)

    def test_ways_that_cannot_be_played_have_no_row(self) -> None:
        found = {"tenants": 3, "used_gpus": 0.5, "ways": {"a": {"gpus": 2, "attained": 100.0}, "b": None}}
        self.assertEqual([row["mode"] for row in fleet.usage_rows("x", found)], ["a", "in use"])


class Traces(unittest.TestCase):
    def test_instances_without_a_gpu_are_left_out(self) -> None:
        head = "instance_sn,role,cpu_request,gpu_request,creation_time,deletion_time\n"
        rows = traces.dlrm_pods(head + "a,HN,8,1,,12.0\nb,CN,64,0,1.0,\nc,HN,8,1,5.0,\n")
        self.assertEqual(rows, [["a", 8000, 0, "1", 1000, "", "LS", 0, 12], ["c", 8000, 0, "1", 1000, "", "LS", 5, ""]])

    def test_placement_and_rates_come_from_the_measured_file(self) -> None:
        data = {"throughput": 6.0, "llm-1": {"throughput": 2.0, "mps": [90, 30], "origin_file": "x_mesh_size8_idx3_stats.json"}}
        self.assertEqual(traces.muxserve_placement(data), [["3", "8", "llm-1", 30]])
        self.assertEqual(traces.muxserve_served(data, {"llm-1": 4.0}), 50)
        models = traces.muxserve_models("- name: llm-1\n  model: /a/llama-13b\n  rate: 4.5\n")
        self.assertEqual(models[0][:3], ["llm-1", "llama-13b", "4.5"])

    def test_use_needs_both_samples_of_a_window(self) -> None:
        duty = "value,timestamp_anon,container_ip\n10.0,100.0,a\n20.0,157.0,a\n"
        memory = "timestamp_anon,value,container_ip\n157.0,1048576.0,a\n"
        self.assertEqual(traces.genai_usage(duty, memory), [["a", 1, 200, 1]])

    def test_pickle_with_another_class_is_refused(self) -> None:
        with self.assertRaisesRegex(pickle.UnpicklingError, "only trace.Request"):
            traces.prism_requests(pickle.dumps(([], [Path("x")])))

    def test_requests_are_read_in_order_of_arrival(self) -> None:
        module = types.ModuleType("trace")
        request = type("Request", (), {"__module__": "trace"})
        module.Request = request  # type: ignore[attr-defined]
        before, sys.modules["trace"] = sys.modules.get("trace"), module
        try:
            each = []
            for at in (2.0, 1.0):
                one = request()
                one.__dict__ = {"adapter_dir": "rank-8-3", "req_time": at, "prompt_len": 4, "output_len": 5}
                each.append(one)
            data = pickle.dumps(([], each))
        finally:
            del sys.modules["trace"]
            if before:
                sys.modules["trace"] = before
        self.assertEqual(traces.prism_requests(data), [["3", 1.0, 4, 5], ["3", 2.0, 4, 5]])
