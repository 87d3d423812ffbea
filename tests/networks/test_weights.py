"""Weights files that are refused."""

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from networks.trunks import same
from safetensors.torch import save_file

from nearkin.errors import NearkinError
from nearkin.networks.backbones import build_trunk
from nearkin.networks.timm_models import import_timm
from nearkin.networks.weights import read_weights


class Trap:
    """Unpickled by a careless reader, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_weights_file_never_runs(tmp_path: Path) -> None:
    for name, write in (("zip.pth", torch.save), ("bare.pth", lambda v, f: f.write_bytes(pickle.dumps(v)))):
        write({"conv1_7x7_s2.weight": Trap(tmp_path / "sprung")}, tmp_path / name)
        with pytest.raises(NearkinError, match=rf"{name} is damaged, or holds more than tensors"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_damaged_files_are_refused(bn_file: Path, tmp_path: Path) -> None:
    whole = bn_file.read_bytes()
    torch.save({"a": torch.zeros(1000)}, tmp_path / "good.pth")
    save_file({"a": torch.zeros(100)}, tmp_path / "good.safetensors")
    damaged = {
        "cut.pth": whole[: len(whole) // 2],
        "zip.pth": (tmp_path / "good.pth").read_bytes()[:2000],
        "short.pth": whole[:10],
        "empty.pth": b"",
        "text.pth": b"<html>not found</html>",
        "cut.safetensors": (tmp_path / "good.safetensors").read_bytes()[:-40],
        "pickle.safetensors": whole[:1000],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(NearkinError, match=rf"{re.escape(name)} is damaged, or holds more than tensors \(.+\)\.$"):
            build_trunk("conv4", weights=tmp_path / name)


def test_zip_bombs_are_refused_before_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "good.pth")
    with (
        zipfile.ZipFile(tmp_path / "good.pth") as good,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for part in good.infolist():
            bomb.writestr(part.filename, good.read(part))
    assert read_weights(tmp_path / "good.pth")["a"].shape == (1_000_000,)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("It was unpacked."))
    with pytest.raises(
        NearkinError, match=r"bomb\.pth would take 4,\d{3},\d{3} bytes unpacked, more than it has on disk"
    ):
        read_weights(tmp_path / "bomb.pth")


def test_files_without_a_state_dict_are_refused(tmp_path: Path) -> None:
    for content in ({"epoch": 3}, {}, [torch.zeros(2)], torch.zeros(2)):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(NearkinError, match="holds no state dict"):
            read_weights(tmp_path / "other.pth")
    for missing in (tmp_path / "nowhere.pth", tmp_path, "defualt"):
        with pytest.raises(NearkinError, match="There is no weights file"):
            build_trunk("conv4", weights=missing)


def test_loading_is_strict(tmp_path: Path) -> None:
    good = build_trunk("conv4").net.state_dict()
    path = tmp_path / "weights.safetensors"
    cases = {
        r"1 missing \(0\.weight\)": {key: v for key, v in good.items() if key != "0.weight"},
        r"1 unexpected \(extra\.weight\)": {**good, "extra.weight": torch.zeros(1)},
        r"1 of another shape \(4\.weight\)": {**good, "4.weight": torch.zeros(64, 32, 5, 5)},
        r"20 missing \(0\.weight, .*, …\); 1 unexpected \(x\)": {"x": torch.zeros(1)},
    }
    for sentence, state in cases.items():
        save_file(state, path)
        with pytest.raises(NearkinError, match=f"holds the weights of another network: {sentence}"):
            build_trunk("conv4", weights=path)
    save_file({key: v for key, v in good.items() if "num_batches" not in key}, path)
    assert same(build_trunk("conv4", weights=path).net, good)


def test_a_transformers_file_does_not_fit_another(tmp_path: Path, bn_file: Path) -> None:
    save_file(import_timm().create_model("test_resnet").state_dict(), tmp_path / "resnet.safetensors")
    for path in (tmp_path / "resnet.safetensors", bn_file):
        with pytest.raises(NearkinError, match="holds the weights of another network"):
            build_trunk("test_vit", weights=path)
