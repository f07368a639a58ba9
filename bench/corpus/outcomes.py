"""A plugin of pytest: a line of JSON for each test that begins or ends, into the file that CORPUS_OUTCOMES names.

A test is right if it passes. It is refused if it ends with an error of CUDA or of one of its libraries, and wrong if it fails in another way.
The run stops after an error of CUDA, as the context may be lost; the next run goes on behind it. A test that takes longer than
CORPUS_PATIENCE seconds ends the process.
"""

import faulthandler
import json
import os
import re

import pytest

FILE = open(os.environ["CORPUS_OUTCOMES"], "a+", buffering=1)
FILE.seek(0)
# What earlier runs began is not run again.
DONE = {json.loads(line).get("test") for line in FILE}
PATIENCE = float(os.environ["CORPUS_PATIENCE"])
# What drivers, libraries and bindings call their errors.
REFUSED = re.compile(r"CUDA_ERROR_|cudaError[A-Z]|\b(CUBLAS|CURAND|CUFFT|CUSOLVER|CUSPARSE|NVJITLINK)_")
# After these a context goes on.
STAYS = re.compile(r"not_?supported|out_?of_?memory", re.I)
# What is not installed.
MISSING = re.compile(r"^(ImportError|ModuleNotFoundError|DynamicLibNotFoundError): |Failure finding \"lib")


def write(**line):
    FILE.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.nodeid not in DONE]


def pytest_runtest_logstart(nodeid, location):
    write(test=nodeid)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        error = f"{call.excinfo.type.__name__}: {call.excinfo.value}".strip()
        result = "skipped" if MISSING.search(error) else "refused" if REFUSED.search(error) else "wrong"
        write(test=item.nodeid, result=result, why=error[:300])
        if result == "refused" and not STAYS.search(error):
            item.session.shouldstop = "an error of CUDA"
    elif report.skipped or call.when == "call":
        write(test=item.nodeid, result="skipped" if report.skipped else "right", seconds=round(report.duration, 2))
    return report


def pytest_sessionfinish(session):
    faulthandler.cancel_dump_traceback_later()
    write(end="stopped" if session.shouldstop else "all")


@pytest.fixture(scope="class")
def initialize_from_pytest_config():
    """What numba-cuda's tests ask of a conftest.py that its wheel does not have."""
