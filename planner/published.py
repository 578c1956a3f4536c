"""Published training runs as points that this program can plan.

`planner/published/throughput.csv` holds the rows that are used, with their sources; each is a fact that others printed.
Rows are left out that do not say their layout or batch, train in FP8, use a schedule or an offload that this program
lacks, or that their own source calls inconsistent.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "published" / "throughput.csv"
# Network of one device, one way, in GB/s, where it is not that of conf/cluster: what each source says of its nodes.
NETWORK = {
    ("fms", "A100"): 6.25,  # 400 Gb/s a node
    ("fms", "H100"): 12.5,  # 800 Gb/s a node
    ("intern", "A100"): 6.25,  # 4 x 100 Gb/s a node
}
# Sources that list memory or failed runs, in a way that this program can repeat.
MEMORY = ("aa", "zb")


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    # Groups of rows that are left out together.
    source: str
    words: tuple[str, ...]
    # None where it ran out of memory.
    tokens_per_s_per_device: float | None
    # GiB, where the source gives it.
    peak_gib: float | None
    oom: bool
    # Rows that differ in nothing but their layout have the same.
    question: tuple


def rows(sources: list[str] | None = None) -> list[Row]:
    """Every row that is used, or those of some sources."""
    with TABLE.open() as file:
        found = [_row(cells) for cells in csv.DictReader(file)]
    return [row for row in found if sources is None or row.source in sources]


def _row(c: dict[str, str]) -> Row:
    source, gated = c["source_key"], c["gated_mlp"] == "1"
    hidden, tp, pp, n = int(c["hidden"]), int(c["tp"]), int(c["pp"]), int(c["n_gpus"])
    cp, vpp, zero, micro = int(c["cp"] or 1), int(c["vpp"] or 1), int(c["zero_stage"]), int(c["micro_batch"])
    dp = n // (tp * pp * cp)
    layers = int(c["layers"]) + (2 if c["short_ends"] == "1" else 0)
    words = [
        f"model.layers={layers}", f"model.hidden={hidden}", f"model.ffn_hidden={c['ffn_hidden']}",
        f"model.heads={c['heads']}", f"model.kv_heads={c['kv_heads']}", f"model.vocab={c['vocab']}",
        f"model.norm={'rmsnorm' if gated else 'layernorm'}", f"model.activation={'swiglu' if gated else 'gelu'}",
        f"model.position={'rope' if gated else 'learned'}", f"model.max_positions={c['seq_len']}",
        f"model.bias={'false' if gated or source.startswith('mpt') else 'true'}",
        f"model.tie_embeddings={c['tied']}", f"model.attention={'sdpa' if c['flash_attention'] == '1' else 'math'}",
        f"train.seq_len={c['seq_len']}", f"train.micro_batch={micro}", f"train.global_batch={c['global_batch']}",
        "train.sample_length=0", "data=mock", f"precision={c['precision']}",
        f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.vpp={vpp}", f"parallel.cp={cp}", f"parallel.dp={dp}",
        f"parallel.zero={zero}", f"parallel.recompute={c['recompute']}",
        f"parallel.sequence_parallel={'true' if c['sequence_parallel'] == '1' and tp > 1 else 'false'}",
        f"parallel.overlap={'false' if zero == 0 or source == 'sc21' else 'true'}",
        f"cluster={c['cluster']}", f"cluster.nodes={max(1, -(-n // 8))}",
    ]  # fmt: skip
    if (source, c["gpu"]) in NETWORK:
        words.append(f"cluster.network_gb_s={NETWORK[source, c['gpu']]}")
    if source == "tt":  # H100s of 500 W with 95 GiB of slower memory
        words += ["cluster.memory_tb_s=2.4", "cluster.memory_gb=102"]
    question = (source, c["model_name"], c["gpu"], c["gpu_mem_gb"], c["n_gpus"], c["seq_len"], c["global_batch"],
                c["flash_attention"], c["note_key"])  # fmt: skip
    number = {key: float(c[key]) if c[key] else None for key in ("tokens_per_s_per_gpu", "peak_gib")}
    return Row(
        c["id"], source, tuple(words), number["tokens_per_s_per_gpu"], number["peak_gib"], c["oom"] == "1", question
    )
