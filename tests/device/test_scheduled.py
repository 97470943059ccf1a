"""The scheduler and its prefix cache on a device, whose waves are small enough to promise equal
bits: jobs beside each other, donors, prompts that end in the middle, every tier. The tests are the
CPU's."""

from __future__ import annotations

from typing import Any

import pytest

from kslserve.engine.cuda import CudaLibrary
from tests.native import test_adopted as adopted
from tests.native import test_scheduled as scheduled
from tests.tiny import tiny_spec, wide_spec

pytestmark = pytest.mark.cuda

cold = adopted.cold
test_every_save_point_of_a_prompt = adopted.test_every_save_point_of_a_prompt
test_a_junction_is_found_the_second_time = adopted.test_a_junction_is_found_the_second_time
test_the_end_of_a_generation = adopted.test_the_end_of_a_generation
test_a_cancelled_prompt_keeps_what_it_computed = (
    adopted.test_a_cancelled_prompt_keeps_what_it_computed
)
test_one_that_gave_way = adopted.test_one_that_gave_way_goes_on_as_if_nothing_was
test_six_that_share_a_beginning = adopted.test_six_that_share_a_beginning
test_from_host_memory = adopted.test_from_host_memory
test_from_disk_after_a_restart = adopted.test_from_disk_after_a_restart


@pytest.fixture(scope="module", params=["bf16", "q4"])
def model(request: pytest.FixtureRequest, cuda: CudaLibrary) -> adopted.Model:
    spec = tiny_spec() if request.param == "bf16" else wide_spec()
    return adopted.model_of(spec, request.param, cuda)


@pytest.mark.parametrize(
    "of_the_cpu",
    [scheduled.test_together_equals_alone, scheduled.test_depth_two_equals_depth_one],
)
async def test_jobs_beside_each_other(cuda: CudaLibrary, of_the_cpu: Any) -> None:
    await of_the_cpu(scheduled.model_of(cuda))
