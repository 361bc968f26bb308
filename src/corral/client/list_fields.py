"""The fields of what lists print, as data: `cli/lists.py` reads an answer without importing msgspec and the messages.

A test compares this module with the messages of `contract/`, and prints what belongs here. A field is its name with a
sign for its type: none for a text, `#` a whole number, `~` a number, `?` yes or no, `|` anything or nothing, `{}` a
mapping, `[]` a list, `[Device]` a list of records, `(ScheduleView)` a record or nothing. `jobID=job_id`: the name on
the wire comes first.
"""

from __future__ import annotations

from collections.abc import Iterator

_SIGNS = "#~?|{[("

FIELDS = {
    "Device": (
        "index# vendor name uuid pci total_bytes# free_bytes| unified? compute_capability driver mig| "
        "temperature_c| utilisation| power_w|"
    ),
    "NodeView": (
        "id name node_type address http_address status total_vram# available_vram# reserved_vram# total_ram# "
        "available_ram# total_disk# available_disk# gpu_vendor gpu_compute_capability capability "
        "max_replicas_per_model# max_replicas_per_model_manually_set? vram_budget vram_budget_bytes# "
        "vram_budget_manually_set? last_heartbeat created_at updated_at model_count# in_flight_count# "
        "labels{} status_reason platform devices[Device] ingress_url ingress_error bus_down? compat? version "
        "row_version# backend_user backend_user_warning backend_user_fix in_flight_unknown"
    ),
    "ScheduleView": (
        "id model_name node_selector min_replicas# max_replicas# spread_all? route_policy "
        "balance_abs_threshold# balance_rel_threshold~ min_prefix_match~ unsatisfiable_until "
        "unsatisfiable_ticks# created_at updated_at"
    ),
    "ModelView": (
        "id backend config_revision origin created_at updated_at row_version# source created_by alias "
        "description context_size# files# size_bytes# tags[] pinned? disabled? ready# schedule(ScheduleView) "
        "definition{} resume_streams?"
    ),
    "OperationNodeView": (
        "node_id node_name status percentage~ file_name current total phase error current_bytes# total_bytes# "
        "rate~ failures# next_retry_at waits? variant version digest note eta_s~ sources{} bad_sources[]"
    ),
    "OperationView": (
        "id name fullName=full_name jobID=job_id progress# taskType=task_type isDeletion=is_deletion? "
        "isBackend=is_backend? isQueued=is_queued? cancellable? message nodeID=node_id nodeName=node_name "
        "phase currentBytes=current_bytes# totalBytes=total_bytes# error nodes[OperationNodeView] kind "
        "backend scope scope_value state settled? processed? outcome created_at created_by finished_at "
        "dismissed? counts{} operation_id"
    ),
    "RequestView": (
        "id at key_id key model served_by path status# node_id node process_id replica# revision digest "
        "queue_ms~ load_ms~ first_byte_ms~ total_ms~ prompt_tokens# completion_tokens# estimated? streamed? "
        "ending tries# error error_text resumed#"
    ),
}
"""The fields of each record, in their order."""


def fields_of(kind: str) -> Iterator[tuple[str, str, str, str]]:
    """Of each field its name on the wire, its name, its sign (`[` and `(` without the record), and the record."""
    for field in FIELDS[kind].split():
        end = next((at for at, letter in enumerate(field) if letter in _SIGNS), len(field))
        wire, _, name = field[:end].partition("=")
        yield wire, name or wire, field[end : end + 1], field[end + 1 : -1]
