"""What people who train large models run into, and the tests that keep it from happening here."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# number: what happens elsewhere, and the tests that would notice it here.
PROBLEMS = {
    1: (
        "the loss changes with TP",
        "test_parity.py::test_the_loss_does_not_change_with_tensor_parallelism",
    ),
    2: (
        "an illegal product of ZeRO, PP and TP is found only after launch",
        "test_sweep.py::test_an_illegal_combination_of_zero_and_layout_is_found_before_any_point_starts",
        "test_refusals.py::test_the_layout_that_is_suggested_is_legal",
    ),
    3: (
        "TP needs CUDA_DEVICE_MAX_CONNECTIONS=1 and FSDP forbids it",
        "test_sweep.py::test_every_point_gets_the_environment_of_its_own_layout",
        "test_environment.py::test_hardware_queues_follow_the_layout",
    ),
    4: (
        "the ZeRO-3 path trains differently",
        "test_parity.py::test_zero3_does_not_train_differently",
    ),
    6: (
        "MFU is against the wrong peak, or nobody says by which FLOP rule",
        "test_planner.py::test_mfu_names_its_peak_and_both_rules",
        "test_tracking.py::test_mfu_is_absent_where_the_peak_is_unknown",
    ),
    7: (
        "W&B has no tokens seen, no tokens per second and no time left",
        "test_train.py::test_a_run_leaves_metrics_of_every_step_under_their_documented_names",
    ),
    8: (
        "every rank has an output folder of its own, or ranks disagree on one",
        "test_attach.py::test_torchrun_on_one_machine",
        "test_attach.py::test_torchrun_on_two_machines_fills_in_data_parallelism",
        "test_sweep.py::test_points_of_different_world_sizes_run_one_after_another_in_folders_of_their_own",
    ),
    9: (
        "the second point of a sweep is killed or frozen, or inherits state from the first",
        "test_sweep_runs.py::test_every_point_starts_afresh_whatever_ran_before_it",
    ),
    10: (
        "all points land in one W&B run, or every rank makes one, or a restart makes another",
        "test_wandb_sweep.py::test_each_point_is_one_run_of_its_group_and_stays_it_when_started_again",
        "test_wandb.py::test_a_run_that_goes_on_from_its_checkpoint_stays_one_wandb_run_without_gap_or_double",
    ),
    11: (
        "a half-finished sweep starts again from the beginning",
        "test_sweep.py::test_a_sweep_is_continued_where_it_stopped",
        "test_sweep.py::test_an_edited_configuration_is_a_new_point",
    ),
    12: (
        "a checkpoint does not load under another layout, or loads without the optimizer's moments",
        "test_checkpoint.py::test_a_checkpoint_loads_under_another_layout_and_precision_with_every_bit_of_its_moments",
        "test_checkpoint.py::test_every_layout_reads_and_writes_every_bit",
        "test_checkpoint.py::test_a_run_that_changes_its_layout_every_five_steps_trains_like_one_that_never_does",
    ),
    13: (
        "resuming shifts the loss or the order of the data",
        "test_checkpoint.py::test_a_resumed_run_has_the_losses_and_the_data_of_the_uninterrupted_one_bit_for_bit",
        "test_checkpoint.py::test_under_every_layout_a_resumed_run_is_bit_for_bit_the_uninterrupted_one",
        "test_checkpoint_files.py::test_a_run_that_is_killed_again_and_again_ends_bit_for_bit_like_one_that_never_was",
    ),
    14: (
        "the loss is -1 or missing on rank 0 under PP",
        "test_parity.py::test_the_loss_is_neither_missing_nor_minus_one_on_the_first_rank_of_a_pipeline",
    ),
    15: (
        "that memory does not suffice is found only by running",
        "test_planner.py::test_out_of_memory_is_known_before_the_launch",
        "test_models.py::test_a_model_too_large_for_this_machine_is_refused_before_it_starts",
    ),
    16: (
        "NaN with no owner, or not counted",
        "test_doctor.py::test_the_doctor_names_the_place",
        "test_doctor.py::test_a_batch_that_is_left_out_is_counted_and_the_run_goes_on",
        "test_train.py::test_a_loss_that_is_not_finite_ends_the_run_as_nan",
    ),
    17: (
        "the gradient norm is inflated under TP",
        "test_parity.py::test_the_gradient_norm_is_not_inflated_by_tensor_parallelism",
    ),
    18: (
        "there is no way to run Megatron-core without a GPU",
        "test_train.py::test_the_first_run_says_that_this_machine_computes_correctly",
    ),
    19: (
        "Llama 2 weights from Hugging Face do not convert",
        "test_llama.py::test_llama_weights_from_hugging_face_convert_and_give_the_same_logits",
        "test_weights.py::test_export_after_import_gives_the_same_files_byte_by_byte",
        "test_weights.py::test_frequencies_that_early_llama_2_files_carry_are_left_out_when_they_are_the_known_ones",
    ),
    20: (
        "FP8 is no faster and it is hard to see what is in FP8 at all",
        "test_precision.py::test_a_run_tells_which_layers_are_in_fp8",
        "test_precision.py::test_fp8_is_real_where_the_gpu_has_it_and_refused_by_name_without_the_package",
        "test_precision.py::test_emulation_is_in_the_name_wherever_a_run_is_shown",
    ),
    21: (
        "Ctrl-C or a kill leaves ranks that hold devices",
        "test_sweep_runs.py::test_no_rank_outlives_a_sweep_that_is_stopped_and_the_same_command_finishes_it",
        "test_launch.py::test_a_killed_parent_leaves_nothing",
        "test_train.py::test_a_run_that_is_stopped_leaves_no_process_and_every_finished_step",
    ),
    22: (
        "the port is in use",
        "test_sweep_runs.py::test_two_sweeps_at_the_same_time_share_neither_folder_nor_port",
        "test_launch.py::test_runs_at_the_same_time_do_not_meet",
    ),
    23: (
        "an offline W&B run that crashed has no configuration and cannot be sent",
        "test_wandb_sweep.py::test_a_crashed_offline_run_has_config_and_summary_and_can_be_sent",
    ),
}


@pytest.mark.parametrize("number", PROBLEMS)
def test_the_problem_has_a_test(number):
    _, *tests = PROBLEMS[number]
    assert tests
    for test in tests:
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), f"{test} is gone"
