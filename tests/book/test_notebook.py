"""Notebooks as files: one form for one content, and directives found where they stand."""

import json

import nbformat
import pytest
from nanobook import notebook as nb


def raw(*cells, metadata=None):
    return {"cells": list(cells), "metadata": metadata or {}, "nbformat": 4, "nbformat_minor": 5}


def code(source, **more):
    cell = {"cell_type": "code", "source": source, "metadata": {}, "outputs": []}
    return {**cell, "execution_count": None, **more}


def written(tmp_path, data):
    path = tmp_path / "01_x.ipynb"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_writing_drops_what_is_volatile(tmp_path):
    path = written(
        tmp_path,
        raw(
            code(
                ["1 + 1\n", "\n"],
                id="4f1c2d3e",
                execution_count=7,
                metadata={"execution": {"iopub.status.busy": "now"}, "tags": ["b", "a"]},
                outputs=[{"output_type": "stream", "name": "stdout", "text": "2"}],
            ),
            metadata={"widgets": {"state": {}}, "language_info": {"version": "3.11.7"}},
        ),
    )
    assert nb.write(path, nb.read(path)) is True
    data = json.loads(path.read_text())
    (cell,) = data["cells"]
    assert cell["source"] == ["1 + 1"]
    assert cell["metadata"] == {"tags": ["a", "b"]}
    assert cell["outputs"] == [] and cell["execution_count"] is None
    assert data["metadata"] == {"kernelspec": nb.KERNEL, "language_info": {"name": "python"}}
    assert nb.write(path, nb.read(path)) is False
    nbformat.validate(nbformat.read(path, as_version=4))


def test_kept_outputs_count_cells_not_runs(tmp_path):
    output = {
        "output_type": "execute_result",
        "data": {"text/plain": "2"},
        "metadata": {"volatile": 1},
        "execution_count": 40,
    }
    path = written(
        tmp_path,
        raw(
            code("a = 1"),
            {"cell_type": "markdown", "source": "# Words", "metadata": {}},
            code("2", execution_count=40, metadata={"tags": ["keep-output"]}, outputs=[output]),
        ),
    )
    nb.write(path, nb.read(path))
    cell = json.loads(path.read_text())["cells"][2]
    assert cell["execution_count"] == 2
    assert cell["outputs"] == [{**output, "metadata": {}, "execution_count": 2}]
    nbformat.validate(nbformat.read(path, as_version=4))


def test_ids_come_from_path_and_symbol_or_the_author_or_the_words():
    notebook = nb.Notebook(
        [
            nb.Cell("code", "%%build nanoserve/layers/norm.py::RMSNorm\nclass RMSNorm: ..."),
            nb.Cell("code", "%%build kernels/nanokernels/kv.py::header\nx", id="something"),
            nb.Cell("markdown", "## The number that hurts\n\nmore"),
            nb.Cell("code", "x = 1", id="predict"),
            nb.Cell("code", "x = 1", id="0e7f1a2b-1111-2222-3333-444455556666"),
            nb.Cell("code", "x = 1", id="cell-12"),
            nb.Cell("code", f"%%build nanoserve/{'long/' * 20}x.py::Y\n"),
            nb.Cell("code", f"%%build nanoserve/{'long/' * 20}x.py::Z\n"),
        ]
    )
    ids = nb.cell_ids(notebook)
    assert ids[:6] == [
        "build-layers-norm-rmsnorm",
        "build-nanokernels-kv-header",
        "text-the-number-that-hurts",
        "predict",
        "code-x-1",
        "code-x-1-2",
    ]
    assert len(set(ids)) == len(ids) and max(map(len, ids)) <= 64
    # Stable: what was written is read back and kept.
    for cell, cell_id in zip(notebook.cells, ids, strict=True):
        cell.id = cell_id
    assert nb.cell_ids(notebook) == ids


def test_directives_are_found_in_order():
    notebook = nb.Notebook(
        [
            nb.Cell("markdown", "%%build nanoserve/no.py::header"),
            nb.Cell("code", "%%build nanoserve/a.py::header\nimport os\n\n\n"),
            nb.Cell("code", "%provide nanoserve/b.py nanoserve/c.py\n%provide nanoserve/d.py"),
            nb.Cell("code", "%%build nanoserve/a.py::A.b\n    def b(self): ..."),
            nb.Cell("code", "print('%provide nothing')"),
        ]
    )
    found = [(d.kind, d.path, d.symbol, d.body, d.cell_index) for d in nb.directives(notebook)]
    assert found == [
        ("build", "nanoserve/a.py", "header", "import os", 1),
        ("provide", "nanoserve/b.py", None, "", 2),
        ("provide", "nanoserve/c.py", None, "", 2),
        ("provide", "nanoserve/d.py", None, "", 2),
        ("build", "nanoserve/a.py", "A.b", "    def b(self): ...", 3),
    ]


@pytest.mark.parametrize("first", ["%%build nanoserve/a.py", "%%build", "%%build a.py::B extra"])
def test_a_malformed_build_line_is_named(first):
    with pytest.raises(nb.NotebookError, match="not of the form"):
        nb.directives(nb.Notebook([nb.Cell("code", f"{first}\nx = 1")]))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": [{}]}', '{"cells": 3}'])
def test_a_file_that_is_no_notebook_is_named(tmp_path, text):
    path = tmp_path / "00_broken.ipynb"
    path.write_text(text)
    with pytest.raises(nb.NotebookError, match=r"00_broken\.ipynb is not a notebook"):
        nb.read(path)
