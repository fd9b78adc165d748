"""Drive a model directly, without an engine: lay rows out over scattered blocks and run steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanoserve.config.arch import ModelArch
from nanoserve.config.model import ModelConfig
from nanoserve.forward import AttentionMetadata, ForwardBatch
from nanoserve.models.loader import load_model


def model_config(folder: str | Path, **overrides: Any) -> ModelConfig:
    """The ModelConfig of a local folder."""
    path = str(folder)
    return ModelConfig(
        model=path,
        path=path,
        tokenizer_path=path,
        served_model_name=[path],
        arch=ModelArch.from_folder(path),
        **overrides,
    )


def make_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: torch.Tensor,
    block_size: int,
    padding: int = 0,
    device: str = "cpu",
) -> AttentionMetadata:
    """Metadata of one step.

    Args:
        query_lens, seq_lens: new tokens and all tokens of each row.
        tables: [num_rows, max_blocks] block ids.
        padding: tokens with slot -1 after the rows' own.
    """
    slots = [torch.full((padding,), -1, dtype=torch.int64)]
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = torch.arange(length - new, length)
        slots.insert(
            len(slots) - 1,
            tables[row].long()[positions // block_size] * block_size + positions % block_size,
        )
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        block_table=tables.to(device, torch.int32),
        slot_mapping=torch.cat(slots).to(device),
        block_size=block_size,
        query_lens=list(query_lens),
        seq_lens_cpu=list(seq_lens),
    )


class DirectModel:
    """A loaded model with a KV cache full of NaN and one scattered block table a row.

    Args:
        folder: the model's folder.
        backend: an attention backend.
        max_len: longest sequence; a dense backend's block size.
        num_rows: sequences that can be held.
    """

    def __init__(
        self,
        folder: str | Path,
        backend: Any,
        *,
        block_size: int = 4,
        max_len: int = 128,
        num_rows: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.backend = backend
        self.device = device
        self.block_size = max_len if backend.name == "dense" else block_size
        self.model: Any = load_model(model_config(folder), dtype, torch.device(device), backend)
        per_row = -(-max_len // self.block_size)
        num_blocks = 1 + per_row * num_rows
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self.tables = order.view(num_rows, per_row)
        self.kv_caches = [
            torch.full(
                backend.kv_cache_shape(
                    num_blocks, self.block_size, layer.shape.num_kv_heads, layer.shape.head_dim
                ),
                float("nan"),
                dtype=dtype,
                device=device,
            )
            for layer in self.model.attention_layers
        ]
        self.lengths = [0] * num_rows

    @torch.inference_mode()
    def step(self, new_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens to the rows (an empty list leaves a row out): logits of all of them."""
        query_lens = [len(ids) for ids in new_ids]
        positions = torch.cat(
            [torch.arange(old, old + n) for old, n in zip(self.lengths, query_lens, strict=True)]
        )
        self.lengths = [old + n for old, n in zip(self.lengths, query_lens, strict=True)]
        metadata = make_metadata(
            query_lens, self.lengths, self.tables, self.block_size, device=self.device
        )
        self.backend.prepare(metadata)
        flat = torch.tensor([token for ids in new_ids for token in ids], device=self.device)
        everything = torch.arange(len(flat), device=self.device)
        batch = ForwardBatch(flat, positions.to(self.device), [metadata], everything)
        return self.model.compute_logits(self.model(batch, self.kv_caches))
