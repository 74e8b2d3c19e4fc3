"""What went wrong for others who train with compressed gradients, and which tests hold that it does not here.

A test is named by its file and function, and by the methods that it is of; without methods it is of all that a check marked
`each` is made with, or of every method where it goes through them. `tests/test_cases.py` holds that the tests are there, and
that nothing is left out without a reason; `docs/reliability.md` has the table.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ranks.harness import PAPERS

TESTS = Path(__file__).parent
FRAMEWORKS = ("core", "PyTorch", "TensorFlow")


class Case(NamedTuple):
    """One kind of fault.

    Attributes:
        fault: what others saw.
        source: public reports of it.
        holds: what is true here instead.
        tests: by framework; "core" is without one. `file::function`, then the methods' names if it is not made with each.
        reasons: why a framework, or a method of it ("TensorFlow atomo"), has no test of its own.
    """

    fault: str
    source: str
    holds: str
    tests: dict[str, tuple[str, ...]]
    reasons: dict[str, str] = {}


NO_MEMORY = "it keeps nothing back"
EXACT = "it has no codes, its values are sent as they are"
CORE = "the same reducer runs under every driver, bit for bit"
ONLY_TORCH = "there is nothing like it in TensorFlow"
ONLY_TENSORFLOW = "there is nothing like it in PyTorch"

CASES = (
    Case(
        "one Inf stays in the accumulated state for ever",
        "horovod #3504, #2957",
        "the step is NaN on all ranks, and no memory moves",
        {
            "core": ("test_conformance.py::test_method",),
            "PyTorch": (
                "ranks/torch_cases.py::one_value_that_is_not_finite_is_forgotten_after_its_step",
                "ranks/torch_cases.py::a_loop_that_skips_steps_that_are_not_finite_goes_on_with_finite_ones",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::one_value_that_is_not_finite_is_forgotten_after_its_step",),
        },
    ),
    Case(
        "sums in half precision overflow before the average",
        "horovod #1699; pytorch PR #57410",
        "everything is summed in float32 or wider; op=Sum shows a true overflow on all ranks",
        {
            "core": ("test_sketch.py::test_a_table_holds_sums_beyond_what_half_precision_holds sketch",),
            "PyTorch": (
                "ranks/torch_cases.py::sums_of_halves_do_not_overflow_before_they_are_averaged sketch atomo dore",
                "ranks/torch_cases.py::a_sketch_of_halves_is_of_floats sketch",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::halves_do_not_overflow_before_they_are_averaged",),
        },
        {"core atomo": "it does not sum what it sends", "core dore": "it does not sum what it sends"},
    ),
    Case(
        "nothing is selected, and the empty message hangs",
        "sands-lab/grace #16; google-deepmind/optax #1754",
        "an empty draw is a message like others; zero gradients give zeros; tensors of no elements go through",
        {
            "core": ("test_conformance.py::test_method",),
            "PyTorch": ("ranks/torch_cases.py::a_rank_or_all_of_them_may_have_nothing_to_send",),
            "TensorFlow": ("ranks/tensorflow_cases.py::gradients_that_are_zero_or_empty_go_through",),
        },
    ),
    Case(
        "scalars and int8 codes are rejected by the collective",
        "sands-lab/grace #2",
        "only uint8, int32 and float32 vectors travel; shapes come back",
        {
            "core": ("test_conformance.py::test_method",),
            "PyTorch": ("ranks/torch_cases.py::scalars_and_tensors_of_one_element_are_averaged",),
            "TensorFlow": ("ranks/tensorflow_cases.py::scalars_and_tensors_of_few_elements_keep_their_shapes",),
        },
    ),
    Case(
        "bits packed past the end of a word, and no code for zero",
        "apache/mxnet PR #7512, #17952; jxbz/signSGD #1",
        "packing is lossless for every length, of the documented size; zeros stay zeros",
        {
            "core": ("test_ternary.py::test_lossless_packing_in_the_size_of_the_formula dore",),
            "PyTorch": ("ranks/torch_cases.py::codes_of_any_number_of_elements_are_cut_between_three_masters dore",),
        },
        {"sketch": EXACT, "atomo": EXACT, "TensorFlow": CORE},
    ),
    Case(
        "bfloat16, half and double gradients meet float32 buffers",
        "learning-at-home/hivemind #545; deepspeed #2071; horovod #4047, #2108",
        "dtypes come back; the range and relative error are those of float32 whatever the dtype",
        {
            "PyTorch": ("ranks/torch_cases.py::wide_and_narrow_floats_keep_their_type_and_their_range",),
            "TensorFlow": ("ranks/tensorflow_cases.py::no_dtype_loses_range_or_precision_on_the_way",),
        },
        {"core": "the core is float32"},
    ),
    Case(
        "the average is taken of integer codes",
        "horovod #2054",
        "codes are decoded, then averaged; Sum is the mean times the ranks; predivide changes nothing",
        {
            "PyTorch": ("ranks/torch_cases.py::what_is_averaged_is_the_values_and_not_their_codes",),
            "TensorFlow": ("ranks/tensorflow_cases.py::codes_are_averaged_as_numbers",),
        },
        {"core": "Horovod divides, not the core"},
    ),
    Case(
        "parameters without gradient are visited in another order on each rank",
        "sands-lab/grace #7",
        "buckets and draws go by the parameter, never by order of arrival or hash",
        {
            "PyTorch": ("ranks/torch_cases.py::parameters_without_gradients_are_visited_in_one_order_on_all_ranks",),
            "TensorFlow": ("ranks/tensorflow_cases.py::variables_without_gradient_are_none_to_a_tape",),
        },
        {"core": "it has no parameters, only buckets"},
    ),
    Case(
        "None for a gradient in TensorFlow",
        "horovod #33",
        "None stays None, in its place; unused and frozen weights stay as they are",
        {
            "TensorFlow": (
                "ranks/tensorflow_cases.py::variables_without_gradient_are_left_alone_in_fit",
                "ranks/tensorflow_cases.py::variables_without_gradient_are_none_to_a_tape",
            )
        },
        {"core": ONLY_TENSORFLOW, "PyTorch": ONLY_TENSORFLOW},
    ),
    Case(
        "the optimizer is wrapped anew each epoch, or its set of parameters changes",
        "horovod #549, #1618; pytorch PR #49418",
        "memory goes by parameter and shape; two live optimizers, and what was added after wrapping, are told",
        {
            "PyTorch": (
                "ranks/torch_cases.py::an_optimizer_is_wrapped_anew_with_the_same_compressor",
                "ranks/torch_cases.py::layers_are_thawed_and_the_optimizer_wrapped_anew",
                "ranks/torch_cases.py::a_layer_of_another_size_under_the_same_name_starts_without_memory",
            ),
            "TensorFlow": (
                "ranks/tensorflow_cases.py::an_optimizer_that_is_made_anew_goes_on_with_the_memory",
                "ranks/tensorflow_cases.py::a_variable_that_is_resized_begins_with_an_empty_memory",
                "ranks/tensorflow_checks.py::frozen_layers_leave_the_memory_of_others_alone dore",
            ),
        },
        {"core": "it has no optimizer"},
    ),
    Case(
        "a parameter is used twice, or backward runs twice, before the step",
        "horovod #2716, #1559; NVIDIA/OpenSeq2Seq #244",
        "one gradient, their sum, is compressed; twice without Horovod's knowledge is an error on all ranks",
        {
            "PyTorch": (
                "ranks/torch_cases.py::a_parameter_that_is_used_more_than_once_has_one_gradient",
                "ranks/torch_cases.py::two_backward_passes_before_a_step_are_one_gradient_where_horovod_is_told",
                "ranks/torch_cases.py::two_backward_passes_before_a_step_are_an_error_where_horovod_is_not_told",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::what_is_used_twice_is_compressed_once_as_the_sum",),
        },
        {"core": "it has no backward pass"},
    ),
    Case(
        "gradients set to None, zeroed in place, or deleted",
        "horovod #3405, PR #4026",
        "three ways, one trajectory; memory is never found by an address",
        {"PyTorch": ("ranks/torch_cases.py::gradients_are_cleared_in_any_way",)},
        {"core": "it keeps no gradient", "TensorFlow": ONLY_TORCH},
    ),
    Case(
        "clipping between synchronize() and step() reduces twice",
        "horovod #1099, #1882",
        "averaged gradients may be changed in place, and the memory does not see it",
        {
            "PyTorch": ("ranks/torch_cases.py::gradients_are_clipped_between_synchronize_and_step",),
            "TensorFlow": ("ranks/tensorflow_cases.py::clipping_after_the_mean_does_not_touch_the_memory",),
        },
        {"core": "it does not clip"},
    ),
    Case(
        "error feedback is configured and not used",
        "sands-lab/grace #10",
        "what is left out is applied later, whole; the input may be overwritten",
        {
            "core": (
                "test_sketch.py::test_what_is_not_applied_waits_and_is_applied_whole sketch",
                "test_conformance.py::test_method dore",
            ),
            "PyTorch": (
                "ranks/torch_cases.py::what_is_small_is_applied_in_the_end sketch dore",
                "ranks/torch_cases.py::what_was_handed_over_may_be_overwritten_at_once",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::what_is_left_out_is_made_good_later sketch dore",),
        },
        {"core atomo": NO_MEMORY, "TensorFlow atomo": NO_MEMORY},
    ),
    Case(
        "error feedback meets a learning rate that changes",
        "bytedance/byteps PR #395",
        "what is kept is a gradient, not an update; rates of zero are no division",
        {
            "core": ("test_conformance.py::test_a_change_of_rate_does_not_apply_what_is_kept_at_the_old_one sketch dore",),
            "PyTorch": (
                "ranks/torch_cases.py::a_learning_rate_that_falls_meets_no_residual_of_the_old_one sketch dore",
                "ranks/torch_cases.py::learning_rates_of_zero_leave_weights_as_they_are",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::a_residual_is_not_scaled_by_the_rate_that_was sketch dore",),
        },
        {"core atomo": NO_MEMORY, "TensorFlow atomo": NO_MEMORY},
    ),
    Case(
        "the compressor's state is not in the checkpoint, or cannot be pickled",
        "pytorch #75666, PR #79334, #58127; horovod #526, #2844",
        "each rank's memory is saved without pickle, and goes on bit for bit; with other ranks none of it is lost",
        {
            "core": (
                "test_redistribution.py::test_no_part_of_a_gradient_is_lost sketch",
                "test_redistribution.py::test_memories_of_gradients_become_their_mean dore",
                "test_redistribution.py::test_those_that_are_left_go_on sketch atomo dore",
                "test_checkpoint.py::test_a_spoilt_file_is_told_or_reads_as_it_was dore",
            ),
            "PyTorch": (
                "test_resume.py::test_the_same_number_of_ranks_goes_on_bit_for_bit sketch atomo dore",
                "test_resume.py::test_more_ranks_go_on_alike sketch atomo dore",
                "ranks/torch_checks.py::copies_have_the_memory_and_no_handles sketch atomo dore",
            ),
            "TensorFlow": (
                "test_resume.py::test_the_same_number_of_ranks_goes_on_bit_for_bit sketch atomo dore",
                "test_resume.py::test_more_ranks_go_on_alike sketch atomo dore",
            ),
        },
    ),
    Case(
        "random draws depend on a generator, a shape, or the order of calls",
        "horovod #3312, #1548; pytorch PR #48507",
        "draws are a function of seed, step, rank and place; generators are left alone; runs are the same bit for bit",
        {
            "core": ("test_random.py::test_keys_depend_on_every_field_and_their_order dore",),
            "PyTorch": (
                "ranks/torch_cases.py::draws_are_shared_and_are_no_others",
                "ranks/torch_cases.py::what_a_rank_sends_is_hashed_alike_or_drawn_apart",
                "test_ranks.py::test_runs_are_the_same_bit_for_bit_where_nothing_is_fused sketch atomo dore",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::draws_do_not_depend_on_the_generators_of_a_rank",),
        },
        {"core sketch": CORE, "core atomo": CORE},
    ),
    Case(
        "a tensor is compressed though that costs more",
        "pytorch #52034",
        "no tensor takes more bytes than dense; what travels dense is exact and keeps nothing",
        {
            "core": (
                "test_conformance.py::test_with_its_usual_options_no_tensor_takes_more_bytes_than_dense sketch atomo dore",
                "test_conformance.py::test_no_tensor_of_a_model_takes_more_bytes_than_dense sketch atomo dore",
            )
        },
        {"PyTorch": CORE, "TensorFlow": CORE},
    ),
    Case(
        "slower than no compression, and a buffer that grows with the ranks",
        "sands-lab/grace #17, #5, #14, #22; horovod #2192",
        "time is linear in the elements; ranks are decoded one after another",
        {
            "core": (
                "test_conformance.py::test_twice_as_many_elements_take_about_twice_as_long sketch atomo dore",
                "test_conformance.py::test_ranks_are_decoded_one_after_another sketch atomo dore",
                "test_conformance.py::test_a_large_matrix_is_taken_apart_within_seconds atomo",
            ),
            "PyTorch": ("ranks/torch_cases.py::a_step_is_not_many_times_slower_than_without_compression",),
            "TensorFlow": ("test_keras.py::test_a_model_of_160_variables_costs_little_more_than_plain_horovod dore",),
        },
        {"TensorFlow sketch": "measured in docs/performance.md", "TensorFlow atomo": "its time is PyTorch's: the same reducer"},
    ),
    Case(
        "alone in the world, gradients are zero",
        "learning-at-home/hivemind #447, PR #450",
        "one process trains as without compression, with or without mpirun",
        {
            "core": ("test_conformance.py::test_method",),
            "PyTorch": (
                "ranks/torch_cases.py::alone_in_the_world_training_is_as_without_compression",
                "ranks/torch_cases.py::alone_in_the_world_a_gradient_comes_back",
                "test_ranks.py::test_one_process_needs_no_mpirun sketch atomo dore",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::alone_in_the_world_training_is_as_without_compression",),
        },
    ),
    Case(
        "join() with uneven data hangs or crashes",
        "horovod #3471, #4020",
        "refused: every rank ends with an error",
        {
            "PyTorch": ("test_faults.py::test_faults_that_end_a_job sketch atomo dore",),
            "TensorFlow": ("test_faults.py::test_a_join_under_tensorflow_ends_the_job sketch atomo dore",),
        },
        {"core": "it has no join"},
    ),
    Case(
        "XLA: works on one process, fails with Horovod",
        "horovod #2590, #801, #1063",
        "jit_compile is refused with its name; steps_per_execution and run_eagerly take the same steps",
        {"TensorFlow": ("ranks/tensorflow_cases.py::ways_to_run_a_fit_have_the_same_steps",)},
        {"core": ONLY_TENSORFLOW, "PyTorch": ONLY_TENSORFLOW},
    ),
    Case(
        "a loaded model's optimizer is not wrapped",
        "horovod #1920, #2486, #1573, #2386",
        "load_model gives a bound optimizer with its state and schedule; files have nothing of ours",
        {
            "TensorFlow": (
                "ranks/tensorflow_cases.py::a_saved_model_goes_on_with_its_schedule_and_is_compressed",
                "ranks/tensorflow_cases.py::a_saved_model_of_mixed_precision_keeps_its_loss_scale dore",
            )
        },
        {"core": ONLY_TENSORFLOW, "PyTorch": ONLY_TENSORFLOW},
    ),
    Case(
        "loss scaling decides on each rank whether to reduce",
        "tensorflow #46863; horovod PR #2647, #2989, #3807",
        "the scale is divided out; an overflow is a step that no rank takes; scales stay equal",
        {
            "PyTorch": ("ranks/torch_checks.py::a_loss_scale_is_divided_out_and_skipped_steps_leave_no_trace sketch atomo dore",),
            "TensorFlow": ("ranks/tensorflow_cases.py::an_overflow_on_one_rank_is_a_step_that_no_rank_takes",),
        },
        {"core": "it has no loss"},
    ),
    Case(
        "sketched training does not learn: no update, no bytes, another one's slice",
        "kiddyboots216/CommEfficient #13, #14, #8; nikitaivkin/csh #10",
        "estimates of one entry are exact, sketches are linear, each parameter has its own gradient back",
        {
            "core": (
                "test_sketch.py::test_one_entry_is_found_exactly sketch",
                "test_sketch.py::test_sketches_of_two_vectors_add_up_to_that_of_their_sum sketch",
                "test_sketch.py::test_more_coordinates_than_there_are_are_all_of_them sketch",
                "test_sketch.py::test_an_even_number_of_rows_is_refused sketch",
            ),
            "PyTorch": (
                "ranks/torch_cases.py::sketches_of_few_rows_learn_beside_tensors_that_are_sent_as_they_are sketch",
                "ranks/torch_cases.py::every_parameter_has_its_own_gradient_back",
            ),
            "TensorFlow": ("ranks/tensorflow_cases.py::a_sketched_training_learns sketch",),
        },
        dict.fromkeys(("atomo", "dore"), "it has no sketch"),
    ),
)


class Found(NamedTuple):
    """A test that a case names.

    Attributes:
        file: relative to tests/.
        each: whether it is made with each of the papers' methods.
    """

    file: str
    function: str
    methods: tuple[str, ...]
    each: bool


def found(reference: str) -> Found:
    """Looks a test up; raises LookupError if it is not there."""
    name, *methods = reference.split()
    file, _, function = name.partition("::")
    functions = _functions(TESTS / file)
    if function not in functions:
        raise LookupError(f"there is no {function} in tests/{file}")
    every = functions[function] or (not methods)
    return Found(file, function, PAPERS if every else tuple(methods), functions[function])


def covered(case: Case, framework: str) -> set[str]:
    """The methods with which a case is tested under a framework."""
    return {method for reference in case.tests.get(framework, ()) for method in found(reference).methods}


def missing(case: Case, framework: str) -> dict[str, str | None]:
    """The methods with which it is not, and why; None where no reason is given."""
    return {
        method: next((case.reasons[key] for key in (f"{framework} {method}", method, framework) if key in case.reasons), None)
        for method in PAPERS
        if method not in covered(case, framework)
    }


@cache
def _functions(path: Path) -> dict[str, bool]:
    """The functions of a file, and whether each is marked as made with each method."""
    return {
        node.name: any(isinstance(d, ast.Name) and d.id == "each" for d in node.decorator_list)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
