"""The marks `ranks` and `slow`, put on tests by what they use, so that no test has to name them.

A test is of `ranks` where it, or a fixture of it, can start several processes of one process group:
it calls `run_ranks` or opens a store for ranks, itself or through helpers, or it reads a case of
the corpus that several ranks have written. `tests.corpus.ranks` fails where ranks are started
without the mark, so a way that this search does not see is noticed in the first run.

The corpus imports torch, so it is imported inside functions: `pytest --help` reads this module and
needs neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import pytest

STARTS_RANKS = frozenset({"run_ranks", "TCPStore", "torch.distributed.run"})
"""Names and texts in the code of what starts ranks."""
SLOW = frozenset(
    {
        "benchmarks/test_gpu_session.py",
        "checkpoint/test_checkpoint.py::test_any_box_reads_like_the_whole",
        "checkpoint/test_module_extra_state.py::test_torch_loads_it_back_strictly",
        "checkpoint/test_rename.py::test_a_base_inside_another_module",
        "checkpoint/test_rename.py::test_as_if_saved_alone",
        "checkpoint/test_rename.py::test_parts_of_a_quantized_weight_follow_its_name",
        "checkpoint/test_rename.py::test_there_and_back",
        "cli/test_broken_plugins.py::test_a_command_goes_on_without_it",
        "cli/test_broken_plugins.py::test_doctor_lists_it",
        "cli/test_cli.py::test_a_closed_stream_is_no_failure",
        "cli/test_cli.py::test_a_reader_that_went_away_is_no_error",
        "cli/test_cli.py::test_interrupted_says_how_to_continue",
        "cli/test_hostile_json.py::test_no_document_is_an_internal_error",
        "cli/test_hostile_names.py::test_no_command_prints_a_control",
        "cli/test_hub_uris.py::test_names_like_a_checkpoint_on_the_hub",
        "cli/test_odd_checkpoints.py::test_a_file_older_than_torch_1_6_is_saved_again",
        "cli/test_prefixes.py::test_the_arguments_that_load_prints",
        "cli/test_prefixes.py::test_the_options_that_each_command_prints",
        "cli/test_progress.py::test_commands_that_read_headers_show_their_phase",
        "cli/test_progress.py::test_on_a_terminal",
        "cli/test_usage_errors.py::test_a_library_that_cannot_be_imported",
        "core/test_formatting.py::test_inspect_on_a_terminal_of_60_columns",
        "core/test_strided_boxes.py::test_composition_is_one_walk_after_the_other",
        "core/test_tensor_columns.py::test_a_changed_output_is_found_by_its_columns",
        "core/test_tensor_columns.py::test_a_damaged_pickle_is_never_read_otherwise",
        "core/test_tensor_columns.py::test_a_flat_state_dict_is_read_as_columns",
        "docs/test_forty_tasks.py::test_task",
        "docs/test_pages.py::test_page",
        "docs/test_pages.py::test_page_of_the_hub",
        "execution/test_cuda_ring.py::test_a_conversion_by_a_device_that_takes_its_time_is_the_same",
        "execution/test_cuda_ring.py::test_pinned_memory_stays_within_max_memory",
        "execution/test_execute.py::test_copies_of_all_sizes",
        "execution/test_execute.py::test_killed_at_any_point_and_continued",
        "execution/test_execute.py::test_no_torch_for_byte_moves_and_speed_of_small_slots",
        "execution/test_many_tensors.py::test_gaps_between_small_slots_are_written_with_them",
        "execution/test_many_tensors.py::test_headers_of_small_items_are_read_in_blocks",
        "execution/test_many_tensors.py::test_inspect_holds_little",
        "execution/test_many_tensors.py::test_the_manifest_is_what_its_entries_say",
        "execution/test_no_sync.py::test_merge_and_pull_take_it_too",
        "execution/test_smaller_feeds.py::test_memory_that_runs_out_amid_a_tensor",
        "formats/dcp/test_dcp.py::test_a_conjugated_tensor_is_named",
        "formats/dcp/test_dcp.py::test_files_beside_the_shards_are_named",
        "formats/dcp/test_dcp.py::test_metadata_cut_or_flipped_is_refused_or_parses",
        "formats/dcp/test_dcp.py::test_random_trees_round_trip",
        "formats/dcp/test_metadata_compaction.py::test_damage_is_read_as_in_full",
        "formats/gguf/test_bad_headers.py::test_a_whole_file_cut_at_any_byte",
        "formats/gguf/test_like.py::test_the_way_there_and_back_is_the_same_file",
        "formats/gguf/test_models.py::test_the_logits_are_those_of_the_model",
        "formats/gguf/test_models.py::test_the_logits_are_those_of_transformers_own_load",
        "formats/gguf/test_writer.py::test_bf16_comes_back_bit_for_bit",
        "formats/gguf/test_writer.py::test_the_file_is_that_of_the_gguf_package",
        "formats/gguf/test_writer.py::test_transformers_loads_it_with_the_same_logits",
        "formats/huggingface/test_model_families.py::test_transformers_loads_and_runs_it",
        "formats/huggingface/test_model_families.py::test_transformers_loads_colpali",
        "formats/huggingface/test_model_families.py::test_transformers_loads_mask2former",
        "formats/huggingface/test_quantized_experts.py::test_experts_that_transformers_stacks_stay_dense",
        "formats/huggingface/test_tied_embeddings.py",
        "formats/huggingface/test_tied_heads.py::test_transformers_loads_models_whose_head_is_tied",
        "formats/rank_files/test_rank_trees.py::test_constants_are_read_from_a_pickle_that_is_alike",
        "formats/rank_files/test_rank_trees.py::test_opcodes_are_those_of_pickletools",
        "formats/test_framework_goldens.py::test_models_are_quantized",
        "formats/test_framework_goldens.py::test_training_goes_along",
        "formats/test_frameworks.py::test_trainer_goes_on_from_other_groups",
        "formats/test_frameworks.py::test_trainer_goes_on_from_what_is_written",
        "formats/test_pickle_and_zip.py::test_more_members_than_16_bits_count",
        "formats/test_pickle_and_zip.py::test_plain_values_are_written_as_pickle_reads_them",
        "formats/test_torch_save.py::test_a_nesting_bomb_is_refused",
        "formats/test_torch_save.py::test_every_flipped_bit_is_equal_or_noticed",
        "integrations/test_integrations.py::test_accelerate_loads_what_it_saved",
        "integrations/test_integrations.py::test_accelerate_loads_what_somebody_else_saved",
        "integrations/test_integrations.py::test_accelerate_with_two_models",
        "integrations/test_integrations.py::test_example_alone",
        "integrations/test_integrations.py::test_resume_needs_a_step",
        "integrations/test_integrations.py::test_resume_skips_what_was_seen",
        "integrations/test_integrations.py::test_trainer_resumes_from_another_trainers_checkpoint",
        "integrations/test_manager_integrations.py",
        "integrations/test_trainer_adapters.py",
        "live/load/test_data_loaders.py::test_a_loader_goes_on_as_if_it_had_not_stopped",
        "live/load/test_data_loaders.py::test_rows_that_draw_in_workers_go_on_or_are_refused",
        "live/load/test_every_form.py",
        "live/load/test_exact_keeps_its_word.py::test_precision_that_is_set_by_backend",
        "live/load/test_exact_keeps_its_word.py::test_settings_that_a_file_has_in_another_form",
        "live/load/test_load.py::test_an_optimizer_built_before_has_what_was_loaded",
        "live/load/test_load.py::test_the_dense_model_is_never_materialised",
        "live/load/test_load_corpus.py::test_every_case_loads",
        "live/load/test_load_names.py::test_a_model_saved_by_transformers_loads_under_its_names_in_memory",
        "live/load/test_load_names.py::test_a_trainer_goes_on_with_stacked_experts",
        "live/manager/test_manager.py::test_a_run",
        "live/manager/test_manager.py::test_a_signal_saves_the_step_and_ends",
        "live/manager/test_manager_directories.py::test_stateful_data_loader",
        "live/manager/test_manager_faults.py",
        "live/model/test_peft.py::test_a_run_on_a_quantized_base",
        "live/model/test_peft.py::test_bitsandbytes_base",
        "live/model/test_peft.py::test_tensors_that_a_file_names_otherwise",
        "live/optimizer/test_cpu_offload.py::test_it_goes_on_bit_for_bit",
        "live/optimizer/test_cpu_offload.py::test_rounding_by_position_is_that_of_an_ordinary_one",
        "live/optimizer/test_exactness_report.py::test_an_inexact_resume_is_reported",
        "live/optimizer/test_lbfgs.py::test_it_goes_on_bit_for_bit",
        "live/optimizer/test_optimizer_pairs.py",
        "live/optimizer/test_resume_exact.py",
        "live/optimizer/test_resume_float8.py",
        "live/optimizer/test_resume_odd.py",
        "live/rounding/test_columns.py",
        "live/rounding/test_position_bits.py::test_compiled_bits_are_those_of_operations_one_by_one",
        "live/rounding/test_position_bits.py::test_rounding_is_unbiased",
        "live/rounding/test_position_bits.py::test_the_kernels_that_are_timed_are_right",
        "live/rounding/test_positions.py::test_any_cut_gives_the_positions_of_the_whole",
        "live/rounding/test_worlds.py",
        "live/save/test_pending_gradients.py",
        "live/save/test_prepare.py",
        "live/save/test_same_as_base.py::test_a_changed_weight_is_saved",
        "live/save/test_save_handle.py::test_the_end_of_the_process_warns_and_logs",
        "live/save/test_save_handle.py::test_the_working_directory_may_change_while_it_writes",
        "live/save/test_staged_values.py::test_a_save_of_many_small_tensors_makes_few_calls_for_each",
        "live/save/test_sweep_saves.py",
        "live/state_dict/test_hooks.py::test_any_optimizer_into_any",
        "mapping/test_authoring_kit.py::test_a_draft_is_for_the_model_of_the_config_and_works_in_convert",
        "mapping/test_authoring_kit.py::test_a_failure_is_one_line",
        "mapping/test_authoring_kit.py::test_convert_plan_and_inspect",
        "mapping/test_authoring_kit.py::test_every_shipped_file_passes",
        "mapping/test_authoring_kit.py::test_mapping_files_are_collected_as_tests",
        "mapping/test_convert.py::test_there_and_back_on_files",
        "mapping/test_end_to_end.py::test_from_the_hub_one_shard_at_a_time",
        "mapping/test_end_to_end.py::test_names_alone_import_no_torch",
        "mapping/test_end_to_end.py::test_quantized_on_the_way",
        "mapping/test_end_to_end.py::test_torn_scale_blocks",
        "mapping/test_end_to_end.py::test_whole_rows_move_with_their_scales",
        "mapping/test_end_to_end_tied.py::test_a_tied_model_with_optimizer_there_and_back",
        "mapping/test_end_to_end_tied.py::test_moments_in_8_bits_go_as_their_weights_go",
        "mapping/test_goldens.py::test_composition_equals_what_the_other_peer_makes",
        "mapping/test_published_shapes.py::test_every_scheme_there_and_back",
        "mapping/test_renamed_in_memory.py::test_transformers_loads_both_and_a_note_tells_them_apart",
        "mapping/test_renamed_in_memory.py::test_modules_are_named_as_on_disk_and_as_in_memory",
        "mapping/test_disk_forms.py::test_experts_are_written_one_by_one_and_loaded_back",
        "planning/test_config_names.py::test_matrices_that_another_program_transposes_are_refused",
        "mapping/test_transformers_live.py::test_gemma_3_with_images_in_all_its_names",
        "mapping/test_transformers_live.py::test_transformers_still_writes_and_loads_these_names",
        "operations/hub/test_as_hub.py::test_as_a_release_on_the_hub",
        "operations/hub/test_pull.py::test_a_pull_killed_anywhere",
        "operations/hub/test_pull.py::test_a_push_killed_anywhere",
        "operations/hub/test_pull.py::test_ctrl_c_says_how_to_continue",
        "operations/hub/test_pull.py::test_what_a_killed_process_leaves_is_swept",
        "operations/hub/test_push.py::test_a_pull_request_for_review",
        "operations/hub/test_push.py::test_a_pull_request_of_a_stranger_is_not_merged",
        "operations/hub/test_push.py::test_a_xet_store_that_cannot_be_reached",
        "operations/hub/test_push.py::test_another_model_that_comes_meanwhile",
        "operations/hub/test_push.py::test_large_files_go_in_several_commits",
        "operations/hub/test_push.py::test_main_that_moves_meanwhile",
        "operations/hub/test_push.py::test_new_weights_take_the_place_of_old_ones",
        "operations/hub/test_push.py::test_push_converts_first",
        "operations/hub/test_push.py::test_push_from_the_hub_to_the_hub",
        "operations/hub/test_push.py::test_quantized_forms_that_users_load",
        "operations/hub/test_push.py::test_what_fails_is_continued_in_the_same_pull_request",
        "operations/hub/test_push.py::test_what_was_damaged_on_the_way_is_not_published",
        "operations/report/test_in_browser.py",
        "operations/report/test_page.py::test_many_tensors_take_little",
        "operations/test_as.py::test_codes_on_the_same_grid_are_kept",
        "operations/test_as.py::test_every_file_of_a_release_in_shards_comes_back",
        "operations/test_as.py::test_trained_under_fsdp2_and_given_back",
        "operations/test_as.py::test_unchanged_weights_are_the_bytes_of_the_release",
        "operations/test_as_everything.py",
        "operations/test_check_source.py::test_a_continued_run_compares_what_the_killed_one_read",
        "operations/test_check_source.py::test_a_flipped_byte_of_a_writers_checkpoint_is_refused",
        "operations/test_check_source.py::test_a_kill_before_the_damage_is_known_keeps_nothing_for_a_good_copy",
        "operations/test_convert.py::test_8_bit_codes_move_as_bytes",
        "operations/test_convert.py::test_moves_are_bit_equal",
        "operations/test_convert.py::test_nf4_decodes_exactly",
        "operations/test_convert.py::test_nf4_payloads_move_as_bytes",
        "operations/test_convert_matrix.py::test_every_container_to_every_setup",
        "operations/test_convert_matrix.py::test_hf_to_every_setup_and_back",
        "operations/test_convert_matrix_readers.py::test_from_formats_that_are_not_written",
        "operations/test_convert_matrix_readers.py::test_from_hf_by_every_writer",
        "operations/test_convert_restart.py::test_interrupt_says_how_to_continue",
        "operations/test_convert_restart.py::test_killed_at_any_point_and_continued",
        "operations/test_convert_restart.py::test_old_destination_stays_until_the_new_one_is_whole",
        "operations/test_convert_restart.py::test_what_a_run_left_that_was_killed_after_its_rename_is_removed",
        "operations/test_default_device.py::test_conversions_do_not_depend_on_it",
        "operations/test_low_bit_releases.py::test_what_was_not_trained_is_the_bytes_of_the_release",
        "operations/test_merge.py::test_any_encoding_is_a_base",
        "operations/test_merge.py::test_fp32_is_bit_equal_to_peft",
        "operations/test_merge_models.py::test_a_head_that_peft_unties_is_a_tensor_of_its_own",
        "operations/test_merge_models.py::test_the_checkpoint_of_a_qlora_run",
        "operations/test_verify_beside.py::test_every_value_of_the_trainers_state_is_compared",
        "operations/test_verify_bits.py::test_a_flipped_bit_is_found_wherever_it_is",
        "optim/test_loader_forms.py",
        "optim/test_lowbit_bnb.py::test_named_and_read_as_it_is_meant",
        "optim/test_optimizer_state.py::test_betas_that_are_tensors",
        "optim/test_optimizer_state.py::test_corpus_state_is_carried",
        "optim/test_optimizer_state.py::test_numbers_for_steps_and_lists_of_one_optimizer",
        "optim/test_optimizer_state.py::test_resumed_run_goes_on_as_if_never_stopped",
        "optim/test_optimizer_state.py::test_trainer_directory",
        "optim/test_optimizer_state.py::test_trainer_groups_are_told_by_the_class",
        "planning/test_activation_scales.py::test_of_weights_that_an_adapter_changes",
        "planning/test_disk_names.py::test_a_state_dict_in_memory_becomes_what_save_pretrained_writes",
        "planning/test_live_encodings.py::test_doctor_prints_it",
        "planning/test_live_encodings.py::test_every_setup_takes_a_quantized_source_or_says_why_not",
        "planning/test_packed_layers.py::test_a_layer_that_others_share_with_its_bias",
        "planning/test_packed_layers.py::test_a_tower_that_fills_every_layer",
        "quantization/test_bnb_fourbit_encoder.py::test_a_tied_head_that_no_file_holds_stays_dense",
        "quantization/test_bnb_fourbit_encoder.py::test_config_json_says_what_is_written",
        "quantization/test_bnb_fourbit_encoder.py::test_transformers_loads_the_model_that_it_would_have_quantized",
        "quantization/test_bnb_fourbit_reader.py::test_a_transformers_model_decodes_to_its_own_weights",
        "quantization/test_bnb_fourbit_reader.py::test_decodes_to_the_bits_of_bitsandbytes",
        "quantization/test_bnb_int8.py::test_transformers_loads_what_we_write",
        "quantization/test_compressed_tensors.py::test_moved_as_it_is_or_decoded",
        "quantization/test_compressed_tensors.py::test_transformers_loads_what_we_write",
        "quantization/test_exact_division.py::test_encoders_decoders_and_recoders_divide_by_no_number",
        "quantization/test_forms_table.py",
        "quantization/test_from_pretrained.py",
        "quantization/test_gpt_oss_mxfp4.py::test_merged_and_loaded_as_its_bfloat16",
        "quantization/test_gptq.py::test_codes_kept_in_compressed_tensors",
        "quantization/test_gptq.py::test_given_back_as_it_was",
        "quantization/test_int8_recode.py::test_int8_codes_are_carried",
        "quantization/test_int8_recode.py::test_over_any_number_of_ranks_and_back",
        "quantization/test_linear_weights.py::test_no_embedding_and_no_head",
        "quantization/test_microscaled_uses.py",
        "quantization/test_moved_codes.py::test_experts_of_gpt_oss_as_modules_and_back",
        "quantization/test_nf4.py::test_blocks_off_the_default_size",
        "quantization/test_nf4.py::test_how_it_is_fed_changes_nothing",
        "quantization/test_nf4.py::test_the_thread_count_changes_no_byte",
        "quantization/test_nf4_recode.py::test_bitsandbytes_to_torchao_keeps_codes",
        "quantization/test_nf4_recode.py::test_exact_scales_carry_every_bit_there_and_back",
        "quantization/test_nf4_recode.py::test_repeated_conversions_do_not_drift",
        "quantization/test_nf4_recode.py::test_torchao_to_bitsandbytes_keeps_codes",
        "quantization/test_nf4_recode_runs.py::test_a_plan_that_keeps_codes_needs_no_torch",
        "quantization/test_nf4_recode_runs.py::test_kept_codes_do_not_depend_on_the_world_size",
        "quantization/test_nf4_recode_runs.py::test_resharding_is_exact_for_every_shape",
        "quantization/test_nf4_recode_runs.py::test_the_command_line_has_both_options",
        "quantization/test_stray_parts.py::test_a_part_is_lost",
        "quantization/test_stray_parts.py::test_a_part_is_there_once_more_under_a_wrapper",
        "quantization/test_torchao_int8.py::test_a_model_that_transformers_stores_under_other_names",
        "quantization/test_torchao_int8.py::test_no_other_is_refused",
        "quantization/test_torchao_int8.py::test_pickles_of_every_release_are_read_as_it_decodes_them",
        "quantization/test_torchao_int8.py::test_reading_imports_no_torchao",
        "quantization/test_torchao_int8.py::test_the_kernels_that_are_timed_are_right",
        "quantization/test_torchao_microscaled.py::test_codes_go_to_compressed_tensors_and_back",
        "quantization/test_torchao_microscaled.py::test_moved_and_given_back_to_torchao",
        "quantization/test_torchao_microscaled.py::test_written_with_its_codes",
        "quantization/test_weight_forms.py::test_the_others_are_as_if_checked_alone",
        "storage/hub/test_addresses.py::test_every_command_answers_them_alike",
        "storage/hub/test_mirror.py::test_convert_is_the_same_as_from_a_local_copy",
        "storage/hub/test_mirror_lifetime.py::test_dropping_a_checkpoint_removes_its_mirror",
        "storage/hub/test_mirror_lifetime.py::test_nothing_is_left_mounted",
        "storage/hub/test_mirror_lifetime.py::test_opened_and_dropped_checkpoints_leave_no_descriptor",
        "storage/hub/test_resume_download.py::test_a_killed_pull_is_continued_within_a_file",
        "storage/test_journal.py::test_every_changed_bit_of_a_line_is_noticed",
        "storage/test_locks.py::test_a_kill_at_the_last_unlink_is_swept_by_the_next_run",
        "storage/test_publish.py::test_killed_at_any_point_of_publishing",
        "storage/test_publish.py::test_race_for_a_stale_lock",
        "storage/test_publish.py::test_race_of_processes",
        "storage/test_publish_by_marker.py::test_a_file_system_that_replaces_full_directories_loses_nothing_by_the_probe",
        "storage/test_publish_by_marker.py::test_another_run_takes_it_back_first",
        "storage/test_publish_by_marker.py::test_killed_after_any_step_it_is_no_checkpoint_and_the_next_run_finishes",
        "storage/test_resource_limits.py::test_a_file_that_may_not_be_so_large",
        "storage/test_resource_limits.py::test_a_full_disk_behind_stdout",
        "storage/test_resource_limits.py::test_too_few_open_files",
        "storage/test_resource_limits.py::test_verify_that_cannot_read_says_nothing_of_the_output",
        "storage/test_resource_limits.py::test_what_is_kept_is_said_by_the_exit_code",
        "storage/test_simulated_device.py",
        "test_imports.py::test_a_cast_does_import_torch",
        "test_output_digests.py::test_outputs_are_the_recorded_bytes",
        "test_packaging.py::test_a_bare_clone_runs_as_a_module",
        "test_packaging.py::test_doctor_says_that_torch_is_missing",
        "test_packaging.py::test_the_bare_python_has_no_torch",
        "test_packaging.py::test_the_wheel_has_the_license",
        "test_packaging.py::test_the_wheel_holds_every_module",
        "test_packaging.py::test_the_wheel_runs_without_torch",
        "testing/test_conformance.py::test_container",
        "testing/test_conformance.py::test_reader",
        "testing/test_conformance.py::test_scheme",
        "testing/test_conformance_faults.py::test_faulty_reader",
        "testing/test_conformance_faults.py::test_reader_that_imports_numpy",
        "testing/test_conformance_faults.py::test_reader_that_is_off_by_one",
        "testing/test_example_format.py::test_conforms",
        "testing/test_example_format.py::test_conforms_in_one_call",
        "testing/test_example_format.py::test_entry_points",
        "torture/test_torture.py",
    }
)
"""Tests that take longer than `SLOW_S` of `tests.support.processor_time`, those whose cases take 0.3 s or more
together and go through whole commands, libraries or faults, and what repeats through a slow library or a server
what a quicker test beside it shows: `PATH` below tests/, `PATH::FUNCTION`, or `PATH::FUNCTION[CASE]`."""


def mark(items: list[pytest.Item]) -> None:
    """Add `ranks` and `slow` to the tests that they are true of."""
    for item in items:
        if isinstance(item, pytest.Function):
            if starts_ranks(item):
                item.add_marker("ranks")
            if is_slow(item):
                item.add_marker("slow")


def is_slow(item: pytest.Function) -> bool:
    """Whether the test, its function or its file is in `SLOW`."""
    case = item.nodeid.removeprefix("tests/")
    function = case.partition("[")[0]
    return not SLOW.isdisjoint({case, function, function.partition("::")[0]})


def starts_ranks(item: pytest.Function) -> bool:
    """Whether the test or one of its fixtures starts ranks, or waits for a corpus that ranks write."""
    if any(_reaches_ranks(function) for function in _functions(item)):
        return True
    from tests.corpus.case import CASES

    return "corpus" in item.fixturenames and any(
        CASES[name].world_size > 1 for name in _cases(item) or CASES
    )


def allow(item: pytest.Item) -> None:
    """Let `run_ranks` start several processes in this test where it has the mark, else not."""
    from tests.corpus import ranks

    ranks.allowed = item.get_closest_marker("ranks") is not None


def _functions(item: pytest.Function) -> Iterator[FunctionType]:
    """Yield the test's own function and those of all fixtures that it asks for, direct or not."""
    yield item.function
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            function = getattr(definition.func, "__wrapped__", definition.func)
            # `corpus` starts ranks for some of its cases alone: see `_cases`.
            if function.__module__.startswith("tests.") and definition.argname != "corpus":
                yield function


def _cases(item: pytest.Function) -> set[str]:
    """Return the cases of the corpus that the test names: in its code, or in its parameters."""
    from tests.corpus.case import CASES

    parameters = [value for value in _parameters(item) if isinstance(value, str)]
    named = set(parameters)
    for function in _functions(item):
        named |= _strings(function.__code__)
        for value in _globals(function):
            if isinstance(value, dict):  # a table from a parameter to its case
                named |= {value[key] for key in parameters if isinstance(value.get(key), str)}
    return named & CASES.keys()


def _parameters(item: pytest.Function) -> list[Any]:
    callspec = getattr(item, "callspec", None)
    return list(callspec.params.values()) if callspec else []


@cache
def _reaches_ranks(function: FunctionType, seen: frozenset[FunctionType] = frozenset()) -> bool:
    """Whether the function names a starter of ranks, or calls a function of the tests that does."""
    if (_names(function.__code__) | _strings(function.__code__)) & STARTS_RANKS:
        return True
    if function in seen:
        return False
    called = (value for value in _globals(function) if isinstance(value, FunctionType))
    return any(
        _reaches_ranks(other, seen | {function})
        for other in called
        if other.__module__.startswith("tests.")
    )


def _globals(function: FunctionType) -> list[Any]:
    """Return the values of the module's names that the function uses."""
    known = function.__globals__
    return [
        getattr(known[name], "__wrapped__", known[name])
        for name in sorted(_names(function.__code__) & known.keys())
    ]


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for inner in _inner(code):
        names |= _names(inner)
    return names


def _strings(code: CodeType) -> set[str]:
    strings = {value for value in code.co_consts if isinstance(value, str)}
    for inner in _inner(code):
        strings |= _strings(inner)
    return strings


def _inner(code: CodeType) -> list[CodeType]:
    return [value for value in code.co_consts if isinstance(value, CodeType)]
