"""Every place where feather touches SGLang, in one table, and the check that the installed SGLang still fits it.

An SGLang with extension points (``patches/``) calls the policies itself: of their hooks it needs those of kind
``calls`` only. Any other is wrapped in two ways: at start by SGLang's own hook registry, as no object of SGLang's
exists yet; after that by ``Wrappings`` on living objects, so that classes stay as they are. Two exceptions:
``pat`` wraps classes, of which SGLang makes objects later; and nothing but the caller's frame tells the loop that
admits from others that read the queue (``AdmissionQueue``). Six kinds:

``start``
    Wrapped through SGLang's hook registry when the plugin loads. They run while a server starts, never per step.
``server``
    Wrapped in the process that starts a server, where a policy, switching or pat is asked for.
``scheduler``
    Wrapped on the one scheduler object, and on the adder and batch it makes for a step, and only when it was started
    with a feather policy: under any other policy the methods that SGLang calls per step are its own, untouched, but
    for ``process_batch_result`` where ``--feather-record-trace`` is given.
``switch``
    Wrapped on the one scheduler object, under any policy, where ``--feather-allow-switch`` is given.
``pat``
    Wrapped when the pat backend is built, and in that process only.
``calls``
    Not wrapped: called or read by feather, so their shape matters just as much.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from importlib import metadata
from typing import Any, NamedTuple

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import SINCE

SUPPORTED = tuple(f"0.5.{patch}" for patch in range(17, 24))
EXTENSION_POINTS = 1  # the version of them that ``scheduler.registered`` is written for
CALLBACKS = (  # of that version, of ``SchedulePolicy``
    *("should_defer_prefill", "propose", "check_admission", "on_request_admitted", "end_admission"),
    *("on_request_queued", "on_step_start", "on_step_result", "on_step_end", "on_continue", "order_rows"),
)
_REGISTRY = "sglang.srt.managers.schedule_policy_registry"
PAGES_SINCE = "0.5.22"  # older ones hand out KV pages of more than one token with a GPU kernel
FEATURES = {"policy": "policies", "switch": "switching", "pat": "pat"}  # what is lost without a part's hooks
SHOWN = 3  # hooks that one line of refusal names; `feather doctor --verbose` lists all


class Hook(NamedTuple):
    """One touching point: dotted target, kind, the leading parameters expected, what it is for."""

    target: str
    kind: str
    parameters: tuple[str, ...]
    purpose: str
    names: tuple[str, ...] = ()  # names and local variables the body must have, where feather relies on how it works
    part: str = "policy"  # of FEATURES: what cannot do without it
    optional: bool = False  # some supported releases do not have it
    also: tuple[str, ...] = ()  # further parts that cannot do without it

    @property
    def features(self) -> list[str]:
        """What is lost where it does not fit, as reports call it."""
        return [FEATURES[part] for part in (self.part, *self.also)]


_ARGS = "sglang.srt.server_args.ServerArgs."
_POLICY = "sglang.srt.managers.schedule_policy."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
INIT = _SCHEDULER + "init_schedule_policy"
_TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
_BATCH = "sglang.srt.managers.schedule_batch."
_ATTENTION = "sglang.srt.layers.attention."
_MEMORY = "sglang.srt.mem_cache."
_DRAFTS = "sglang.srt.speculative."
_SET_KV = "(self, layer, loc_info, cache_k, cache_v, k_scale, v_scale)"


def _hook(signature: str, kind: str, purpose: str, names: str = "", **more: Any) -> Hook:
    target, _, parameters = signature.rstrip(")").partition("(")
    return Hook(target, kind, tuple(parameters.split(", ")), purpose, tuple(names.split()), **more)


_POLICY_HOOKS = (
    _hook(_ARGS + "add_cli_args(parser)", "start", "policy names and --feather-* flags", also=("switch", "pat")),
    _hook(
        _ARGS + "check_server_args(self)",
        "start",
        "refuses flags, lets priority scheduling pass",
        also=("switch", "pat"),
    ),
    _hook(
        "sglang.srt.entrypoints.engine._scheduler_died_error(rank, proc)",
        "server",
        "a scheduler's refusal ends the server without a traceback",
        optional=True,
        also=("switch", "pat"),
    ),
    _hook(
        _POLICY + "SchedulePolicy._validate_and_adjust_policy(self, policy, tree_cache)",
        "start",
        "accept the policy names",
    ),
    _hook(INIT + "(self)", "start", "take over a scheduler started with them", also=("switch",)),
    _hook(
        _POLICY + "SchedulePolicy.calc_priority(self, waiting_queue, running_batch)",
        "scheduler",
        "an admission round opens",
    ),
    _hook(
        _POLICY + "SchedulePolicy._touch_waiting_prefixes(self, policy, waiting_queue)",
        "calls",
        "prefixes of waiting requests stay in the cache",
        optional=True,
    ),
    _hook(
        _POLICY + "SchedulePolicy.waiting_queue_prefix_matched(self, waiting_queue)",
        "scheduler",
        "a load report counts the tokens that are not cached",
        optional=True,
    ),
    _hook(_SCHEDULER + "_add_request_to_queue(self, req)", "scheduler", "a request arrives or comes back"),
    _hook(
        _SCHEDULER + "_get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch)",
        "scheduler",
        "an admission round, request by request",
        "waiting_queue adder can_run_list calc_priority add_one_req get_num_allocatable_reqs running_loras",
    ),
    _hook(
        _POLICY + "PrefillAdder.add_one_req(self, req, has_chunked_req, truncation_align_size)",
        "scheduler",
        "a proposed request was admitted or not",
        "can_run_list",
    ),
    _hook(_SCHEDULER + "update_running_batch(self, batch)", "scheduler", "prefix row order before a decode step"),
    _hook(_SCHEDULER + "process_batch_result(self, batch, result)", "scheduler", "the reward; a recording"),
    _hook(_SCHEDULER + "continue_generation(self, recv_req)", "scheduler", "a pause is over: nothing was measured"),
    _hook(
        _SCHEDULER + "get_next_batch_to_run(self, running_batch, last_batch)",
        "scheduler",
        "the debug check, the decision log",
    ),
    _hook(_SCHEDULER + "get_num_allocatable_reqs(self, running_bs)", "calls", "free slots of the batch"),
    _hook(
        _BATCH + "Req._compute_max_prefix_len(self, input_len)",
        "calls",
        "how much of a prompt may come from the cache",
    ),
    _hook(_BATCH + "ScheduleBatch.filter_batch(self)", "calls", "permutes all state that SGLang keeps per row", "reqs"),
)
_SWITCH_HOOKS = (
    _hook(_SCHEDULER + "set_internal_state(self, recv_req)", "switch", "takes the order to switch"),
    _hook(_SCHEDULER + "get_internal_state(self, recv_req)", "scheduler", "tells of the policy", also=("policy",)),
    _hook(_TOKENIZER + "set_internal_state(self, obj)", "calls", "the order to all schedulers"),
    _hook(_TOKENIZER + "get_internal_state(self)", "calls", "what came of it, from all"),
    _hook(_SCHEDULER + "is_fully_idle(self)", "calls", "whether requests run or wait"),
    _hook(
        "sglang.srt.runtime_context.RuntimeContext.override(self, source)", "calls", "the policy that SGLang reports"
    ),
    _hook("sglang.srt.utils.auth.auth_level(level)", "calls", "the admin key guards the endpoint"),
)
_PAT_HOOKS = (
    _hook(_ARGS + "__post_init__(self)", "start", "the backend beside pat, as SGLang resolves its flags"),
    _hook(_ARGS + "resolve_once(self)", "start", "the same where it resolves later", optional=True),
    _hook(_ATTENTION + "attention_registry.register_attention_backend(name)", "calls", "adds pat"),
    _hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new(cls, batch, model_runner)",
        "pat",
        "the requests of the next decode batch",
    ),
    _hook(
        _ATTENTION
        + "hybrid_attn_backend.HybridAttnBackend.__init__(self, model_runner, prefill_backend, decode_backend)",
        "pat",
        "packed prefill",
    ),
    _hook(
        _MEMORY
        + "unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.collect_path_info(self, end_node_ids)",
        "calls",
        "prefixes that prompts share",
        optional=True,
    ),
    _hook(
        _DRAFTS + "draft_utils.DraftBackendFactory.create_decode_backend(self)",
        "pat",
        "a draft model's decode steps",
        "speculative_num_steps",
    ),
    _hook(
        _DRAFTS + "draft_utils.DraftBackendFactory.create_draft_extend_backend(self)",
        "pat",
        "the draft model's pass over the verified tokens",
    ),
    _hook(
        _ATTENTION + "base_attn_backend.AttentionBackend.init_forward_metadata(self, forward_batch)",
        "calls",
        "the order of a step's preparation",
        "init_forward_metadata_out_graph init_forward_metadata_in_graph",
    ),
    _hook(
        _ATTENTION
        + "base_attn_backend.AttentionBackend.init_forward_metadata_out_graph(self, forward_batch, in_capture)",
        "calls",
        "where pat plans",
    ),
    _hook(_MEMORY + "memory_pool.MHATokenToKVPool.set_kv_buffer" + _SET_KV, "calls", "writes a step's KV"),
    _hook(_MEMORY + "memory_pool.MHATokenToKVPool.get_key_buffer(self, layer_id)", "calls", "the cached keys"),
    _hook(
        _DRAFTS + "cpp_ngram.ngram_corpus.NgramCorpus.batch_get(self, req_ids)",
        "pat",
        "n-grams as chains",
        optional=True,
    ),
    _hook(
        _SCHEDULER + "_apply_war_barrier(self)",
        "calls",
        "rows of slots keep still until a step has read or copied them",
        "SGLANG_FORCE_COARSE_WAR_BARRIER",
    ),
    _hook(
        _MEMORY + "swa_memory_pool.SWAKVPool.set_kv_buffer" + _SET_KV,
        "calls",
        "the same where windows have a pool of their own",
        "layers_mapping full_kv_pool",
    ),
    _hook(
        _MEMORY + "memory_pool.HybridLinearKVPool.set_kv_buffer(self, layer)",
        "calls",
        "the same beside linear attention",
        "full_kv_pool",
    ),
)
HOOKS = (
    *_POLICY_HOOKS,
    *(hook._replace(part="switch") for hook in _SWITCH_HOOKS),
    *(hook._replace(part="pat") for hook in _PAT_HOOKS),
)


def installed_version() -> str | None:
    """The installed SGLang's version, or None without one."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def extension_points() -> int | None:
    """Version of the extension points in the installed SGLang's source; None where it has none."""
    try:
        return int(importlib.import_module(_REGISTRY).SCHEDULE_POLICY_API_VERSION)
    except ModuleNotFoundError:
        return None


def is_needed(hook: Hook, part: str) -> bool:
    """Whether a part of feather uses that hook on the installed SGLang."""
    if part not in (hook.part, *hook.also):
        return False
    # Where SGLang calls the policies, a switch still needs to know of each scheduler, under any policy.
    replaced = "policy" in (hook.part, part) and hook.kind != "calls" and not (part == "switch" and hook.target == INIT)
    return not replaced or extension_points() is None


def is_newer_patch(version: str | None) -> bool:
    """Whether that release came after the newest one that feather was tested with, under the same minor version."""
    newest = SUPPORTED[-1].split(".")
    found = re.fullmatch(rf"{newest[0]}\.{newest[1]}\.(\d+)(?:\.post(\d+))?", version or "")
    return found is not None and (int(found[1]), int(found[2] or 0)) > (int(newest[2]), 0)


def is_usable(version: str | None) -> bool:
    """Whether feather runs on that release, if its hooks fit."""
    return version in SUPPORTED or is_newer_patch(version)


def untested(version: str | None) -> str | None:
    """What to say of a release that is usable and newer than all that feather was tested with."""
    return f"{_newer(version)}; its hooks fit" if is_newer_patch(version) else None


def _newer(version: str | None) -> str:
    return f"sglang {version} is newer than {SUPPORTED[-1]}, the newest that feather is tested with"


def lacks_policy(version: str | None, name: str) -> bool:
    """Whether that supported SGLang is older than the schedule policy; False for a version that is not known."""
    return name in SINCE and version in SUPPORTED[: SUPPORTED.index(SINCE[name])]


def lacks_pages(version: str | None) -> bool:
    """Whether that supported SGLang has KV pages of more than one token on a GPU only."""
    return version in SUPPORTED[: SUPPORTED.index(PAGES_SINCE)]


def mismatch(hook: Hook) -> str | None:
    """What differs between the installed SGLang and what ``hook`` expects, or None if it fits."""
    try:
        found = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return None if hook.optional else f"{hook.target}: not found ({error})"
    except Exception as error:  # an SGLang that does not import raises whatever it likes
        return f"{hook.target}: cannot be imported ({type(error).__name__}: {error})"
    function = getattr(found, "__func__", found)
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"{hook.target}: not a function"
    if parameters[: len(hook.parameters)] != hook.parameters:
        return f"{hook.target}: takes ({', '.join(parameters)}), expected ({', '.join(hook.parameters)}, ...)"
    code = getattr(inspect.unwrap(function), "__code__", None)
    used = () if code is None else (*code.co_names, *code.co_varnames, *code.co_cellvars)
    missing = [name for name in hook.names if name not in used]
    if missing:
        return f"{hook.target}: does not use {', '.join(missing)} any more"
    return None


def exists(hook: Hook) -> bool:
    """Whether the installed SGLang has the hook's target."""
    try:
        pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    return True


def mismatches(part: str = "policy") -> list[str]:
    """Everything that keeps the installed SGLang from working with a part of feather; empty if it fits."""
    version = installed_version()
    if version is None:
        return ["SGLang is not installed"]
    found = [] if is_usable(version) else [f"sglang {version} is not one of {SUPPORTED[0]} to {SUPPORTED[-1]}"]
    points = extension_points() if part != "pat" else None
    if points not in (None, EXTENSION_POINTS):
        found.append(f"its extension points are of version {points}, feather knows version {EXTENSION_POINTS}")
    elif points is not None:
        policy = importlib.import_module("sglang.srt.managers.schedule_policy").SchedulePolicy
        if lacking := [name for name in CALLBACKS if not hasattr(policy, name)]:
            found.append(f"its extension points lack {', '.join(lacking)}: apply the whole series of patches/")
    needed = (hook for hook in HOOKS if is_needed(hook, part))
    differing = ((hook, mismatch(hook)) for hook in needed)
    return found + [f"{problem} (for: {hook.purpose})" for hook, problem in differing if problem is not None]


def misfit(part: str = "policy") -> str | None:
    """Why the installed SGLang cannot run a part of feather, in one line; None if it can."""
    found = mismatches(part)
    if not found:
        return None
    version = installed_version()
    named = [_newer(version)] if is_newer_patch(version) else []
    named += found[:SHOWN]
    if len(found) > SHOWN:
        named.append(f"and {len(found) - SHOWN} more: `feather doctor --verbose` lists them")
    return "; ".join(named)


def require_fit(asked: str, part: str = "policy") -> None:
    """Raise ``FeatherError`` if the installed SGLang cannot run the part that the flag ``asked`` for."""
    if reason := misfit(part):
        raise FeatherError(f"this SGLang does not fit {asked}: {reason}")
