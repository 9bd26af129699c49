"""Starts each process of a stack with its settings, and describes it."""

from pathlib import Path

from launch.models.coreml_models import require_converted
from launch.models.names import name_of_folder
from launch.models.pair import Pair
from launch.settings.machine import computes_on_cpu, has_cuda, share_cores
from launch.settings.settings import StackSettings
from launch.stack.child import Child
from launch.stack.http_listener import HttpListener, write_key
from launch.stack.run_dir import RunDir
from protocol.decoding.model_sampling import read_model_sampling
from protocol.decoding.sampling_params import get_preset
from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import ProcessStatus, Sampling
from protocol.settings import (
    Device,
    DrafterSettings,
    OrchestratorSettings,
    RankGroupSettings,
    VerifierSettings,
)
from protocol.transport.address import is_loopback, split_host


def start_orchestrator(
    settings: StackSettings, pair: Pair, run_dir: RunDir, lifeline: int
) -> Child:
    """Start the orchestrator."""
    child_settings = OrchestratorSettings(
        lifeline=lifeline,
        log_level=settings.log_level,
        services_address=run_dir.services_address,
        clients_address=run_dir.clients_address,
        run_dir=str(run_dir.path),
        model=pair.model,
        concurrency=settings.decode_concurrency,
        max_waiting=settings.max_waiting,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_prompt_bytes=settings.max_prompt_bytes,
        prompt_timeout_s=settings.prompt_timeout_s,
        prompt_memory_bytes=settings.prompt_memory_bytes,
        parse_special=settings.parse_special,
        max_stop_strings=settings.max_stop_strings,
        max_stop_bytes=settings.max_stop_bytes,
        max_deaths=settings.max_deaths,
        draft_timeout_s=settings.draft_timeout_s,
        verify_timeout_s=settings.verify_timeout_s,
        hang_timeout_s=settings.hang_timeout_s,
        first_timeout_s=settings.start_timeout_s,
        lookup_only=not pair.has_drafter,
    )
    return Child("orchestrator", "orchestrator.main", child_settings, run_dir.log("orchestrator"))


def start_verifier(settings: StackSettings, pair: Pair, run_dir: RunDir, lifeline: int) -> Child:
    """Start a verifier."""
    shared = share_cores(pair.backend)
    ranks = _rank_group(settings, shared.verifier)
    cores = ranks.hosts[0].cores if ranks else shared.verifier
    child_settings = VerifierSettings(
        lifeline=lifeline,
        log_level=settings.log_level,
        address=run_dir.services_address,
        model=pair.model,
        cores=cores,
        threads=max(1, len(cores)),
        prefill_step_size=settings.prefill_step_size,
        prompt_cache_size=settings.prompt_cache_size,
        prompt_cache_bytes=settings.prompt_cache_bytes,
        prompt_cache_file=_absolute(settings.prompt_cache_file),
        kv_bytes=settings.kv_bytes,
        device=settings.target_device,
        prefill=settings.prefill,
        metal_kernels=settings.metal_kernels,
        cpu_activations=settings.cpu_activations,
        prefill_model=_prefill_model(settings, pair),
        compute_units=settings.compute_units,
        adapter=pair.adapter,
        spare_cores=[] if ranks or not cores else shared.drafter,
        idle_flag="" if ranks else _idle_flag(settings, pair, run_dir, "verifier"),
        spare_flag="" if ranks else _idle_flag(settings, pair, run_dir, "drafter"),
        ranks=ranks,
        prelaunches=ranks is None and _shares_no_gpu(settings, pair),
    )
    return Child("verifier", "services.verifier.main", child_settings, run_dir.log("verifier"))


def _shares_no_gpu(settings: StackSettings, pair: Pair) -> bool:
    """Return True if the target computes on CUDA, and its first drafter on another card.

    A drafter that is swapped in later, or another target of `ssd serve`, may still share the card:
    then each has to wait for the other at times.
    """
    if not has_cuda() or computes_on_cpu(settings.target_device) or pair.backend == "stdio":
        return False
    if pair.backend == "remote":
        return pair.server is None or not is_loopback(split_host(pair.server.address)[0])
    if computes_on_cpu(settings.draft_device):
        return True
    target, draft = _card(settings.target_device), _card(settings.draft_device)
    return target is not None and draft is not None and target != draft


def _card(device: Device) -> int | None:
    """Return the number of this GPU; None if unspecified: CUDA's first one is the fastest."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" else None


def _idle_flag(settings: StackSettings, pair: Pair, run_dir: RunDir, role: str) -> str:
    """Return the file in which this service reports idle cores; empty if no process could use
    them.
    """
    cores = share_cores(pair.backend)
    drafts_here = pair.backend != "remote" and (
        pair.backend not in {"mlx", "head"} or computes_on_cpu(settings.draft_device)
    )
    shares = drafts_here and computes_on_cpu(settings.target_device)
    return str(run_dir.idle_flag(role)) if shares and cores.verifier and cores.drafter else ""


def _rank_group(settings: StackSettings, cores: list[int]) -> RankGroupSettings | None:
    """Return the ranks of the target, if it is spread; errors as for `launch.settings.ranks`."""
    if settings.target_ranks == 1 and not (settings.hosts or settings.split or settings.backend):
        return None
    from launch.settings.ranks import rank_group  # noqa: PLC0415  # only with ranks

    return rank_group(settings, cores)


def _absolute(file: str) -> str:
    return str(Path(file).expanduser().absolute()) if file else ""


def _prefill_model(settings: StackSettings, pair: Pair) -> str:
    """Return the converted target, if it computes prompts; raise ModelError without one."""
    return "" if settings.prefill == "mlx" else str(require_converted(Path(pair.model)))


def start_drafter(settings: StackSettings, pair: Pair, run_dir: RunDir, lifeline: int) -> Child:
    """Start a drafter."""
    shared = share_cores(pair.backend)
    cores, ranks = shared.drafter, _rank_group(settings, shared.verifier)
    child_settings = DrafterSettings(
        lifeline=lifeline,
        log_level=settings.log_level,
        address=run_dir.services_address,
        backend=pair.backend,
        compute_units=settings.compute_units,
        weights=settings.draft_weights,
        model=pair.draft_model,
        target=pair.model if pair.backend == "head" else "",
        command=list(pair.command),
        lines=pair.lines,
        server=pair.server.address if pair.server else "",
        server_key=pair.server.key if pair.server else "",
        key_file=str(pair.server.key_file) if pair.server else "",
        ready_timeout_s=settings.start_timeout_s,
        answer_timeout_s=settings.draft_timeout_s,
        cores=cores,
        threads=max(1, len(cores)),
        idle_flag=_idle_flag(settings, pair, run_dir, "drafter"),
        spare_cores=[] if ranks or not cores else shared.verifier,
        spare_flag="" if ranks else _idle_flag(settings, pair, run_dir, "verifier"),
        prefill_step_size=settings.prefill_step_size,
        prompt_cache_size=settings.prompt_cache_size,
        prompt_cache_bytes=settings.prompt_cache_bytes,
        # Other backends have no choice of device; one may have been swapped in.
        device=settings.draft_device if pair.backend in {"mlx", "head"} else "",
    )
    return Child("drafter", "services.drafter.main", child_settings, run_dir.log("drafter"))


def preset_sampling(settings: StackSettings, pair: Pair | None = None) -> Sampling:
    """Return the default sampling of HTTP requests, for a model if specified."""
    asks = pair is not None and settings.preset == "default"
    recommended = read_model_sampling(pair.model) if pair is not None and asks else {}
    return Sampling(**{**recommended, **get_preset(settings.preset).sampling})


def name_model(settings: StackSettings, pair: Pair, run_dir: RunDir) -> GatewayModel:
    """Return the model of a stack, as its gateway offers it."""
    called = [name_of_folder(pair.model), settings.model, pair.model, "default", "default_model"]
    return GatewayModel(
        names=[name for name in dict.fromkeys(called) if name],
        clients_address=run_dir.clients_address,
        folder=pair.model,
        sampling=preset_sampling(settings, pair),
    )


def start_gateway(
    settings: StackSettings,
    models: list[GatewayModel],
    run_dir: RunDir,
    lifeline: int,
    listener: HttpListener,
    *,
    model_server: str = "",
) -> Child:
    """Start a gateway for these models behind the listener."""
    child_settings = GatewaySettings(
        lifeline=lifeline,
        models=models,
        model_server=model_server,
        load_timeout_s=3 * settings.start_timeout_s,
        # A stack's folder is removed by its orchestrator.
        run_dir=str(run_dir.path) if model_server else "",
        listener=listener.listener,
        hosts=[settings.host, *_list_words(settings.allowed_hosts)],
        key_file=write_key(run_dir.path, settings.api_key),
        allowed_origins=_list_words(settings.allowed_origins),
        max_body_bytes=settings.max_body_bytes,
        strict=settings.strict,
        rate_limit=settings.rate_limit,
        sampling=models[0].sampling if not model_server else preset_sampling(settings),
        max_draft_tokens=get_preset(settings.preset).max_draft_tokens,
        log_level=settings.log_level,
    )
    return Child("gateway", "services.gateway.main", child_settings, run_dir.log("gateway"))


def describe_gateway(child: Child) -> ProcessStatus:
    """Describe a gateway, for users and programs."""
    return ProcessStatus(
        role=child.role, pid=child.pid, backend="", model="", state="running", restarts=0
    )


def describe_child(child: Child, settings: StackSettings, pair: Pair) -> ProcessStatus:
    """Describe a child that has just been started, for users and programs."""
    backend, model, device = {
        "orchestrator": ("", pair.model, ""),
        "verifier": ("mlx", pair.model, settings.target_device),
        "gateway": ("", "", ""),
        "drafter": (pair.backend, pair.drafts_with, settings.draft_device),
    }[child.role]
    return ProcessStatus(
        role=child.role,
        pid=child.pid,
        backend=backend,
        model=model,
        state="starting",
        restarts=0,
        device=device,
    )


def _list_words(text: str) -> list[str]:
    """Split at commas and blanks."""
    return text.replace(",", " ").split()
