"""What a benchmark comes to: the best of what would run otherwise, and where ssd loses."""

import msgspec

from launch.bench.headline import headline, speeds_by_prompt, total_seconds
from launch.bench.result import BenchRun
from launch.bench.tables import drafting
from tests.launch.bench.test_figures import figures, file, run


def answer(
    prompt: str, category: str, mode: str, tok_s: float, temperature: float = 0.0
) -> BenchRun:
    return msgspec.structs.replace(
        run(), prompt_id=prompt, category=category, mode=mode, decode_tps=tok_s,
        temperature=temperature, ttft_ms=500.0, decode_s=2.0,
    )  # fmt: skip


RUNS = [
    answer("a", "chat", "mlx-lm", 22.0), answer("a", "chat", "ar", 16.0),
    answer("a", "chat", "ssd", 20.0), answer("a", "chat", "ssd:k=4", 11.0),
    answer("b", "code", "mlx-lm", 20.0), answer("b", "code", "ar", 16.0),
    answer("b", "code", "ssd", 30.0), answer("b", "code", "ssd:k=4", 33.0),
]  # fmt: skip


def test_the_best_of_the_others_is_named() -> None:
    """Not plain decoding where mlx-lm is faster; and a loss is called one."""
    chat, code, everything = headline(file(*RUNS))
    assert chat == (
        "chat: ssd 20.0 tok/s, SLOWER, 0.91 times the best of the others (mlx-lm, 22.0)"
    )
    assert code == "code: ssd:k=4 33.0 tok/s, 1.65 times the best of the others (mlx-lm, 20.0)"
    assert everything.startswith("all prompts: ssd 25.0 tok/s, 1.20 times")


def test_each_temperature_has_its_own() -> None:
    """They are not mixed."""
    warm = [answer("a", "chat", mode, speed, 0.7) for mode, speed in (("ar", 10.0), ("ssd", 15.0))]
    cold = [answer("a", "chat", mode, speed) for mode, speed in (("ar", 10.0), ("ssd", 12.0))]
    assert [line.split(",")[0] for line in headline(file(*cold, *warm))] == [
        "all prompts: ssd 12.0 tok/s",
        "all prompts at T=0.7: ssd 15.0 tok/s",
    ]


def test_nothing_to_compare_is_no_headline() -> None:
    """Without ssd, or with nothing else."""
    assert headline(file(*[one for one in RUNS if one.mode == "ar"])) == []
    assert headline(file(*[one for one in RUNS if one.mode == "ssd"])) == []


def test_prompts_and_totals() -> None:
    """A row per prompt, and the time that all answers of a mode took, prompts included."""
    assert speeds_by_prompt(RUNS)["code b"] == {
        "mlx-lm": 20.0, "ar": 16.0, "ssd": 30.0, "ssd:k=4": 33.0,
    }  # fmt: skip
    assert total_seconds(RUNS)["ssd"] == 5.0


def test_the_table_of_drafting_names_drafter_states_and_lags() -> None:
    """Which drafter, how much it read in a round, and acceptance at each lag that came up."""
    result = msgspec.structs.replace(
        file(run()),
        summary={
            "ar": figures(17.0),
            "ssd": msgspec.structs.replace(
                figures(31.0), acceptance_rate=0.5, drafter="head H", state_bytes_per_round=16e3,
                offered_by_lag=[4, 0, 2], accepted_by_lag=[3, 0, 0],
            ),
        },
    )  # fmt: skip
    names, ssd = drafting(result).columns
    rows = dict(zip(map(str, names.cells), map(str, ssd.cells), strict=True))
    assert rows["drafter"] == "head H"
    assert rows["states, kB a round"].startswith("16.0")
    assert rows["accepted at lag 1"].startswith("0.75")
    assert rows["accepted at lag 3"].startswith("0.0")
    assert "accepted at lag 2" not in rows
