"""Starting each process of a stack with its settings, and describing it."""

from pathlib import Path

from launch.models.coreml_models import require_converted
from launch.models.pair import Pair
from launch.settings.machine import machine_name, share_cores
from launch.settings.paths import cache_dir
from launch.settings.ranks import describe_ranks, rank_group
from launch.settings.settings import StackSettings
from launch.stack.child import Child
from launch.stack.http_listener import HttpListener, write_key
from launch.stack.run_dir import RunDir
from protocol.decoding.sampling_params import get_preset
from protocol.messages import ProcessStatus, Sampling
from protocol.settings import (
    DrafterSettings,
    GatewaySettings,
    OrchestratorSettings,
    VerifierSettings,
)


def start_orchestrator(
    settings: StackSettings, pair: Pair, run_dir: RunDir, lifeline: int
) -> Child:
    """Start the orchestrator."""
    told = OrchestratorSettings(
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
        max_stop_strings=settings.max_stop_strings,
        max_stop_bytes=settings.max_stop_bytes,
        max_deaths=settings.max_deaths,
        draft_timeout_s=settings.draft_timeout_s,
        verify_timeout_s=settings.verify_timeout_s,
        hang_timeout_s=settings.hang_timeout_s,
        first_timeout_s=settings.start_timeout_s,
        learned_dir=str(cache_dir() / "learned") if settings.learned_estimates else "",
        # All that times depend on, besides the models.
        machine=f"{machine_name()} {settings.target_device} {settings.draft_device} "
        f"{settings.emulate_target_cost} {describe_ranks(rank_group(settings))}".strip(),
    )
    return Child("orchestrator", "orchestrator.main", told, run_dir.log("orchestrator"))


def start_verifier(settings: StackSettings, pair: Pair, run_dir: RunDir, lifeline: int) -> Child:
    """Start a verifier."""
    shared = share_cores(pair.backend)
    ranks = rank_group(settings, shared.verifier)
    cores = ranks.hosts[0].cores if ranks else shared.verifier
    told = VerifierSettings(
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
        prefill_model=_prefill_model(settings, pair),
        compute_units=settings.compute_units,
        emulated_cost=settings.emulate_target_cost,
        spare_cores=[] if ranks else shared.drafter,
        ranks=ranks,
    )
    return Child("verifier", "services.verifier.main", told, run_dir.log("verifier"))


def _absolute(file: str) -> str:
    return str(Path(file).expanduser().absolute()) if file else ""


def _prefill_model(settings: StackSettings, pair: Pair) -> str:
    """The converted target, if prompts are to go through it; raises ModelError without one."""
    return "" if settings.prefill == "mlx" else str(require_converted(Path(pair.model)))


def start_drafter(settings: StackSettings, pair: Pair, run_dir: RunDir, lifeline: int) -> Child:
    """Start a drafter."""
    cores = share_cores(pair.backend).drafter
    told = DrafterSettings(
        lifeline=lifeline,
        log_level=settings.log_level,
        address=run_dir.services_address,
        backend=pair.backend,
        compute_units=settings.compute_units,
        # Lookup drafts without a model, but the target's tokenizer tells what a schema allows.
        model=pair.model if pair.backend == "ngram" else pair.draft_model,
        command=list(pair.command),
        lines=pair.lines,
        server=pair.server.address if pair.server else "",
        server_key=pair.server.key if pair.server else "",
        key_file=str(pair.server.own) if pair.server else "",
        ready_timeout_s=settings.start_timeout_s,
        answer_timeout_s=settings.draft_timeout_s,
        cores=cores,
        threads=max(1, len(cores)),
        prefill_step_size=settings.prefill_step_size,
        prompt_cache_size=settings.prompt_cache_size,
        prompt_cache_bytes=settings.prompt_cache_bytes,
        # Other backends have no device to choose; one may have been swapped in.
        device=settings.draft_device if pair.backend == "mlx" else "",
    )
    return Child("drafter", "services.drafter.main", told, run_dir.log("drafter"))


def start_gateway(
    settings: StackSettings, pair: Pair, run_dir: RunDir, lifeline: int, listener: HttpListener
) -> Child:
    """Start a gateway behind the listener."""
    folder = Path(pair.model)
    called = [folder.name, settings.model, pair.model, "default", "default_model"]
    told = GatewaySettings(
        lifeline=lifeline,
        clients_address=run_dir.clients_address,
        listener=listener.listener,
        names=[name for name in dict.fromkeys(called) if name],
        hosts=[settings.host, *_list_words(settings.allowed_hosts)],
        key_file=write_key(run_dir.path, settings.api_key),
        allowed_origins=_list_words(settings.allowed_origins),
        max_body_bytes=settings.max_body_bytes,
        strict=settings.strict,
        rate_limit=settings.rate_limit,
        model=pair.model,
        sampling=Sampling(**get_preset(settings.preset)),
        log_level=settings.log_level,
    )
    return Child("gateway", "services.gateway.main", told, run_dir.log("gateway"))


def describe_child(child: Child, settings: StackSettings, pair: Pair) -> ProcessStatus:
    """A child that has just been started, for people and programs."""
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
        emulated_cost=settings.emulate_target_cost if child.role == "verifier" else "",
    )


def _list_words(text: str) -> list[str]:
    """What commas and blanks separate."""
    return text.replace(",", " ").split()
