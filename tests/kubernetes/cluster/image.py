"""The one image of the cluster, made without a registry, and what of this computer its containers see."""

import hashlib
import io
import json
import site
import sys
import tarfile
from pathlib import Path
from typing import Any

IMAGE = "midstep.test/host:1"
REPOSITORY = Path(__file__).resolve().parents[3]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_FOLDERS = ("tmp", "root", "proc", "sys", "dev", "etc", "run", "var")
_PASSWORDS = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_PROGRAM = "busybox"  # at the top: over /bin this computer's is laid. It goes by its name


def seen_folders() -> list[Path]:
    """Return the folders of this computer that a container sees: its programs, this Python, and this repository."""
    wanted = [*map(Path, _SYSTEM), Path(sys.base_prefix), Path(sys.prefix), REPOSITORY]
    wanted += [Path(folder) for folder in (*sys.path, *site.getsitepackages())]
    there = sorted({path for path in wanted if path.is_absolute() and path.is_dir()})
    return [path for path in there if not any(path != other and path.is_relative_to(other) for other in there)]


def add_folders(specification: dict[str, Any]) -> None:
    """Have every container of an OCI runtime specification see those folders, read-only."""
    mounts = specification.setdefault("mounts", [])
    for folder in seen_folders():
        options = ["rbind", "ro"]
        mounts.append({"destination": str(folder), "type": "bind", "source": str(folder), "options": options})


def write_image(path: Path, busybox: Path) -> None:
    """Write the image as an archive that containerd imports. A container that is given no command does nothing."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        for name in _FOLDERS:
            _add(files, name, None, mode=0o1777 if name == "tmp" else 0o755)
        _add(files, "etc/passwd", _PASSWORDS)
        _add(files, _PROGRAM, busybox.read_bytes(), mode=0o755)
    data = layer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": [f"/{_PROGRAM}", "sleep", "2147483647"],
            "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    said = json.dumps(config).encode()
    named = f"{hashlib.sha256(said).hexdigest()}.json"
    manifest = [{"Config": named, "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        _add(archive, named, said)
        _add(archive, "layer.tar", data)
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _add(archive: tarfile.TarFile, name: str, data: bytes | None, *, mode: int = 0o644) -> None:
    """Add a file, or a folder where there is no data."""
    about = tarfile.TarInfo(name)
    about.mode = mode
    if data is None:
        about.type = tarfile.DIRTYPE
        archive.addfile(about)
    else:
        about.size = len(data)
        archive.addfile(about, io.BytesIO(data))
