"""Guards against traps of TensorFlow and Horovod, each taken out of a copy of the package: its check must then fail.

A check that passes without what it is there for shows nothing. That all of them pass with it is shown elsewhere.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import RANKS
from launch import ROOT, mpirun

BINDING, COMPRESSOR, REDUCTION = (f"tensorflow/{name}.py" for name in ("binding", "compressor", "reduction"))
DRIVER, ADAPTER, KERAS, SESSION = "drivers/tensorflow.py", "adapter.py", "keras.py", "session.py"
NEVER = "if False:"


class Guard(NamedTuple):
    """What is replaced in a file, once, and the checks that must then fail, on so many ranks."""

    name: str
    file: str
    old: str
    new: str
    checks: str
    ranks: int = 2
    hangs: bool = False  # the ranks then wait for each other for ever; else a check must fail and say how


GUARDS = [
    # Whose gradient it is
    Guard(
        "memory is by the variables",
        COMPRESSOR,
        "*map(id, variables))",
        "*(tuple(v.shape) for v in variables))",
        "two_optimizers_with_one_compressor_do_not_share_memory frozen_layers_leave_the_memory_of_others_alone "
        "two_functions_of_a_gan_have_a_memory_each",
    ),
    Guard(
        "ids are those of living variables",
        COMPRESSOR,
        "if held is None or any(ref() is not variable for ref, variable in zip(held.variables, variables)):",
        "if held is None:",
        "memory_goes_with_the_variables",
    ),
    Guard(
        "memory of dead variables is given up",
        COMPRESSOR,
        "self._retire()\n",
        "pass\n",
        "memory_goes_with_the_variables",
    ),
    Guard(
        "one warns of another set",
        COMPRESSOR,
        "self._warn_of_another_set(variables)\n            made",
        "made",
        "frozen_layers_leave_the_memory_of_others_alone",
    ),
    Guard(
        "names are unique",
        REDUCTION,
        'name if seen[name] == 1 else f"{name}#{seen[name]}"',
        "name",
        "variables_of_one_name_are_told_apart",
    ),
    Guard(
        "unbound, places keep their shapes",
        COMPRESSOR,
        "if reduction.variables != [variable]:",
        NEVER,
        "unbound_one_compressor_for_two_models_of_other_shapes_is_refused",
    ),
    # Tracing, and Horovod's cache
    Guard(
        "functions are kept from step to step",
        REDUCTION,
        "if treatment not in self._functions:",
        "if True:",
        "tapes_of_every_step_trace_once_and_fill_no_cache",
    ),
    Guard(
        "Horovod's cache does not see the compressor of a tape",
        BINDING,
        "DistributedGradientTape(tape, **options), compression, optimizer",
        "DistributedGradientTape(tape, compression=compression, **options), optimizer",
        "tapes_of_every_step_trace_once_and_fill_no_cache",
    ),
    Guard(
        "compressors are equal to themselves alone",
        COMPRESSOR,
        "    # Horovod's Compressor API\n",
        "    def __eq__(self, other):\n        return self._seed == other._seed\n",
        "a_compressor_is_its_own_key",
    ),
    Guard(
        "AutoGraph is kept out",
        REDUCTION,
        "tf.autograph.experimental.do_not_convert(function)",
        "function",
        "autograph_leaves_our_text_alone",
    ),
    # The token
    Guard(
        "tokens depend on the gradients",
        COMPRESSOR,
        "return token * tf.cast(fine, token.dtype), mean",
        "return token, mean",
        "equal_gradients_are_not_merged",
    ),
    Guard(
        "tokens are tested",
        ADAPTER,
        "if not (factor > 0 and abs(reduced[1] - factor * mean_square) <= 1e-3 * factor * mean_square):",
        NEVER,
        "an_unknown_operation_is_found_out_by_the_token",
    ),
    # What is refused
    Guard(
        "unbound, whole models are refused",
        COMPRESSOR,
        "if self._cut.whole_model:",
        NEVER,
        "whole_models_are_refused_unbound_and_bound_by_the_callback",
    ),
    Guard(
        "unbound, a learning rate is refused",
        COMPRESSOR,
        'if getattr(self.method, "rescale", False):',
        NEVER,
        "rescale_goes_by_the_learning_rate",
    ),
    Guard(
        "unbound, a loss scale is refused",
        COMPRESSOR,
        "if called_by(is_loss_scaled):",
        NEVER,
        "mixed_precision_models_train_bound_and_are_refused_unbound",
    ),
    Guard(
        "unbound, eager is refused",
        COMPRESSOR,
        "if tf.executing_eagerly():",
        NEVER,
        "without_graphs_bound_works_and_unbound_is_refused",
    ),
    Guard(
        "unbound, unknown shapes are refused",
        COMPRESSOR,
        " or not tensor.shape.is_fully_defined():",
        ":",
        "unbound_a_sparse_gradient_made_dense_is_refused",
    ),
    Guard(
        "graphs of TensorFlow 1 are refused",
        COMPRESSOR,
        'if not hasattr(graph, "outer_graph"):',
        NEVER,
        "graphs_of_tensorflow_1_are_refused",
    ),
    Guard(
        "unbound, XLA is refused",
        COMPRESSOR,
        "        refuse_graph(tensor.graph)\n",
        "",
        "xla_is_refused_and_an_optimizers_own_is_no_matter",
    ),
    Guard(
        "bound, XLA is refused",
        BINDING,
        "if not tf.executing_eagerly():",
        NEVER,
        "xla_is_refused_and_an_optimizers_own_is_no_matter",
    ),
    Guard(
        "only a function's XLA is refused",
        COMPRESSOR,
        ' and hasattr(caller, "python_function")',
        "",
        "xla_is_refused_and_an_optimizers_own_is_no_matter",
    ),
    Guard(
        "gradients are of their variables' shapes",
        REDUCTION,
        "gradient if gradient.shape == shape else tf.ensure_shape(gradient, shape)",
        "gradient",
        "gradients_of_unknown_shape_have_that_of_their_variable",
    ),
    # Sparse gradients
    Guard(
        "sparse gradients are left sparse",
        BINDING,
        "isinstance(gradient, tf.IndexedSlices) and not told.sparse_as_dense",
        "False",
        "sparse_gradients_are_as_without_compression",
    ),
    Guard(
        "sparse gradients go to Horovod",
        DRIVER,
        'transport.average_slices(one, f"sparse_{number}", turn)',
        "one",
        "sparse_gradients_are_as_without_compression",
    ),
    Guard(
        "sparse gradients are summed if told so",
        REDUCTION,
        "_multiplied(slices, treatment.factor)",
        "slices",
        "sparse_gradients_are_as_without_compression",
    ),
    # Process sets
    Guard(
        "collectives are of the process set",
        DRIVER,
        ', "process_set": self._set}',
        "}",
        "process_sets_average_among_themselves",
        3,
        hangs=True,
    ),
    Guard(
        "unbound, who is not in the process set builds nothing",
        COMPRESSOR,
        "if not process_set.included():",
        NEVER,
        "process_sets_average_among_themselves",
        3,
    ),
    Guard(
        "bound, who is not in the process set sends nothing",
        BINDING,
        "if not process_set.included() or process_set.size() == 1:",
        "if process_set.size() == 1:",
        "process_sets_average_among_themselves",
        3,
    ),
    Guard(
        "there is one process set",
        COMPRESSOR,
        "if self._set not in (None, process_set):",
        NEVER,
        "unbound_a_process_set_that_the_compressor_was_not_given_is_found_out",
        3,
    ),
    # What Horovod was told
    Guard(
        "sums are sums",
        BINDING,
        "float(process_set.size()) if told.op == hvd.Sum else 1.0",
        "1.0",
        "a_sum_is_not_dropped_by_horovods_tensorflow_module",
    ),
    Guard(
        "the optimizer is of Horovod's module that does not lose the operation",
        BINDING,
        "attach(keras.DistributedOptimizer(",
        "attach(hvd.DistributedOptimizer(",
        "a_sum_is_not_dropped_by_horovods_tensorflow_module",
    ),
    Guard(
        "backward passes that are added up are bound",
        BINDING,
        'for name in ("allreduce_grads", "_allreduce_grads"):',
        "for name in ():",
        "every_option_is_as_without_compression",
    ),
    # Mixed precision and the learning rate
    Guard(
        "a loss scale is divided out",
        REDUCTION,
        "return gradient if scale is None else gradient / tf.cast(scale, gradient.dtype)",
        "return gradient",
        "loss_scaling_is_divided_out a_tape_is_told_of_the_loss_scale",
    ),
    Guard(
        "a loss scale is multiplied in again",
        REDUCTION,
        "mean = mean * tf.cast(scale, mean.dtype)",
        "pass",
        "loss_scaling_is_divided_out a_tape_is_told_of_the_loss_scale",
    ),
    Guard(
        "halves travel as float32",
        REDUCTION,
        "gradient if keep else tf.cast(gradient, tf.float32)",
        "gradient",
        "dtypes_are_kept",
    ),
    Guard(
        "doubles travel as float64",
        REDUCTION,
        "keep = gradient.dtype == tf.float64 and number in self._beside",
        "keep = False",
        "dtypes_are_kept",
    ),
    Guard(
        "unbound, halves travel as float32",
        COMPRESSOR,
        "return tf.float64 if dtype == tf.float64 else tf.float32",
        "return dtype",
        "dtypes_are_kept",
    ),
    Guard(
        "the rate of a schedule is that of this step",
        REDUCTION,
        "rate = inner._learning_rate",
        "rate = inner.learning_rate",
        "rescale_goes_by_the_learning_rate",
    ),
    # Transactions
    Guard(
        "a step is committed by all or by none",
        SESSION,
        "self._verdict = not self.nonfinite",
        "self._verdict = True",
        "a_step_with_a_nan_leaves_no_trace",
    ),
    Guard(
        "tensors in no bucket are to be finite",
        DRIVER,
        "self.session.check_finite(all(map(bool, inputs[scales:])))",
        "pass",
        "a_step_with_a_nan_leaves_no_trace",
    ),
    Guard(
        "tensors in no bucket are NaN in a step that was given up",
        DRIVER,
        "[mean * tf.cast(fine, mean.dtype) for mean in averaged_dense]",
        "averaged_dense",
        "a_step_with_a_nan_leaves_no_trace",
    ),
    Guard(
        "errors before the method are kept for the peers",
        DRIVER,
        "except Exception as error:  # the peers",
        "except ZeroDivisionError as error:  # the peers",
        "an_error_before_the_method_is_raised_on_all",
    ),
    Guard(
        "errors of the method are kept for the peers",
        SESSION,
        "except Exception as error:  # whatever it is",
        "except ZeroDivisionError as error:  # whatever it is",
        "a_failure_on_one_rank_is_raised_on_all_and_leaves_no_trace",
    ),
    Guard(
        "errors of a memory are kept for the first step",
        COMPRESSOR,
        "except CompressionError as error:  # told",
        "except ZeroDivisionError as error:  # told",
        "a_saved_memory_of_another_rank_is_refused_in_the_first_step",
        hangs=True,
    ),
    Guard(
        "errors keep their class",
        REDUCTION,
        "raise self.program.failure or error from None",
        "raise",
        "an_error_before_the_method_is_raised_on_all",
    ),
    Guard(
        "a step that broke off is forgotten",
        DRIVER,
        "if self.session.begun:",
        NEVER,
        "a_step_that_broke_off_is_begun_anew",
    ),
    Guard(
        "ranks agree on resets",
        SESSION,
        "self._resets, self._taken_up]",
        "self._taken_up]",
        "a_rank_that_resets_alone_is_found_out",
    ),
    # The graph
    Guard(
        "the handshake is in the first step only",
        DRIVER,
        "np.bool_(not self.session.met)",
        "np.bool_(True)",
        "the_handshake_is_in_the_first_step_that_is_executed",
    ),
    Guard(
        "collectives come after the handshake",
        DRIVER,
        "with tf.control_dependencies([met]):",
        "with contextlib.nullcontext():",
        "ranks_that_differ_hear_in_what_in_the_first_step",
        hangs=True,
    ),
    Guard(
        "names have no scope",
        DRIVER,
        '"ignore_name_scope": True',
        '"ignore_name_scope": False',
        "what_is_named_goes_out_under_that_name",
    ),
    Guard(
        "names are given",
        DRIVER,
        '"name": f"{self.prefix}_{name}", ',
        "",
        "what_is_named_goes_out_under_that_name",
    ),
    Guard(
        "names are of one reduction",
        COMPRESSOR,
        "{next(_instances[prefix])}",
        "0",
        "trainings_in_two_threads_do_not_meet",
    ),
    Guard(
        "what TensorFlow gives is not written to",
        DRIVER,
        "array.setflags(write=False)",
        "pass",
        "tensorflows_memory_cannot_be_written_to",
    ),
    Guard(
        "what TensorFlow gets is a copy",
        DRIVER,
        "mean[where].reshape(shape).copy()",
        "mean[where].reshape(shape)",
        "the_memory_is_not_what_tensorflow_works_on",
    ),
    # Keras
    Guard(
        "the callback has what was traced traced anew",
        KERAS,
        "make_train_function(force=True)",
        "make_train_function()",
        "the_callback_binds_what_was_traced_unbound_before",
    ),
    Guard(
        "the callback resets after the first batch",
        KERAS,
        "reduction.session.reset()",
        "pass",
        "the_first_batch_leaves_no_memory_where_weights_are_broadcast",
    ),
    Guard(
        "a memory that was loaded is not reset",
        COMPRESSOR,
        "reduction.resumed = True",
        "pass",
        "a_memory_that_is_taken_up_is_not_emptied",
    ),
    Guard(
        "a memory is found by its facts",
        COMPRESSOR,
        'one["facts"] == session.facts or _contradicts(one["facts"], session.facts)',
        "number == 0",
        "memories_are_found_by_what_they_are_of",
    ),
    Guard(
        "a memory is of the epoch before",
        "checkpoint.py",
        "if further.get(name) != value:",
        NEVER,
        "a_training_goes_on_from_its_checkpoint_bit_for_bit",
    ),
    Guard(
        "a file that cannot be read is told to all ranks",
        "checkpoint.py",
        "compression.fail(told)",
        "raise",
        "a_training_goes_on_from_its_checkpoint_bit_for_bit",
    ),
    Guard(
        "what is bound stays bound",
        BINDING,
        "reduce.compressor if isinstance(reduce, Bound) else told.compression\n    compressor",
        "told.compression\n    compressor",
        "what_is_bound_stays_bound",
    ),
    Guard(
        "sparse gradients are to be finite",
        DRIVER,
        "*(slices.values for slices in sparse))]",
        ")]",
        "an_overflow_in_a_sparse_gradient_leaves_no_trace",
    ),
    Guard(
        "names are of what a set is, not of when it was traced",
        COMPRESSOR,
        "repr([(v.name, v.shape) for v in variables])",
        "repr(None)",
        "ranks_may_trace_two_models_in_any_order",
    ),
    Guard(
        "an epoch without averaging is told of",
        KERAS,
        "if not steps and self.bind and _must_have_averaged(self.model.optimizer):",
        NEVER,
        "a_train_step_that_averages_nothing_is_told_of",
    ),
    Guard(
        "a wrapped optimizer's loss scale is found",
        BINDING,
        "called_by(is_loss_scaled) or self.optimizer",
        "self.optimizer",
        "loss_scaling_is_divided_out",
    ),
    Guard(
        "a step that is given up has the lengths of now",
        DRIVER,
        "_filler(stages[number + 1], size, self._turn)",
        "_filler(stages[number + 1]._replace(length=7 * session.group.rank + 1), size, self._turn)",
        "a_schedule_changes_options_without_tracing",
    ),
    Guard(
        "Horovod remembers no gather, and refuses it beside a join",
        DRIVER,
        "return payload.reshape(-1, 1) if turn % 2 else payload",
        "return payload",
        "no_gather_has_the_shape_that_it_had_the_last_time",
    ),
    Guard(
        "an optimizer that is made anew is not traced anew",
        REDUCTION,
        "if not (is_loss_scaled(treatment.optimizer) or self._rescales):",
        NEVER,
        "eager_steps_are_traced_once_whatever_the_optimizer",
    ),
]


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.name.replace(" ", "_") for guard in GUARDS])
def test_its_text_is_there(guard: Guard) -> None:
    assert (ROOT / "hvdcompress" / guard.file).read_text().count(guard.old) == 1, guard


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("guard", GUARDS, ids=[guard.name.replace(" ", "_") for guard in GUARDS])
def test_without_its_guard_a_check_fails(guard: Guard, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hvdcompress", tmp_path / "hvdcompress", ignore=shutil.ignore_patterns("__pycache__"))
    file, sign = tmp_path / "hvdcompress" / guard.file, "imported without its guard"
    text, checks = file.read_text(), guard.checks.split()
    assert guard.old in text
    file.write_text(f"{text.replace(guard.old, guard.new)}\nprint({sign!r}, flush=True)\n")
    done = mpirun(
        guard.ranks,
        RANKS / "tensorflow_checks.py",
        tmp_path,
        *checks,
        timeout=30 if guard.hangs else 120,
        PYTHONPATH=f"{tmp_path}:{ROOT / 'tests'}:{ROOT / 'examples'}",
        HOROVOD_DYNAMIC_PROCESS_SETS="1",
    )
    assert done.stdout.count(sign) == guard.ranks, done.stdout[-3000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(guard.ranks)]
    for check in checks:
        ends = {result.get(check, "was not begun") for result in results}
        found = "did not end" in ends if guard.hangs else any("Traceback" in end for end in ends)
        assert found and "was not begun" not in ends, f"{check}: {ends}\n{done.stdout[-3000:]}"
