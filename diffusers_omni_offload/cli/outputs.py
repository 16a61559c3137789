"""Files that calls write to: which kinds there are, for which pipelines, and their names."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers_omni_offload.cli.errors import BadInput, Failed
from diffusers_omni_offload.cli.models import Model

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".gif", ".mp4")


@dataclass(frozen=True)
class Output:
    """Where outputs go.

    Attributes:
        path: as it was given.
        fps: frames per second of a video.
    """

    path: Path
    fps: int

    @property
    def is_video(self) -> bool:
        """Whether it is the file of a video."""
        return self.path.suffix.lower() in VIDEOS

    def of(self, index: int | None) -> Path:
        """The file of one of several prompts: `cat.png` becomes `cat-3.png`. None if there is only one."""
        return self.path if index is None else self.path.with_name(f"{self.path.stem}-{index}{self.path.suffix}")

    def write(self, result: Any, index: int | None = None) -> list[Path]:
        """Write what a pipeline returned; the files' paths.

        Raises:
            Failed: it returned something else than pictures or frames, or they can't be written.
        """
        found = getattr(result, "frames" if self.is_video else "images", None)
        if found is None:
            raise Failed(f"The pipeline returned {type(result).__name__}, of which nothing fits into {self.path.name}.")
        path = self.of(index)
        try:
            if self.is_video:
                self._write_video(list(found[0]), path)
                return [path]
            pictures = list(found[0]) if isinstance(found[0], (list, tuple)) else list(found)
            paths = [path] if len(pictures) == 1 else [Output(path, self.fps).of(at) for at in range(len(pictures))]
            for picture, target in zip(pictures, paths, strict=True):
                picture.save(target)
        except OSError as error:
            raise Failed(f"{path} can't be written: {error.strerror or error}") from error
        return paths

    def _write_video(self, frames: list[Any], path: Path) -> None:
        from diffusers.utils import export_to_gif, export_to_video

        if path.suffix.lower() == ".gif":
            export_to_gif(frames, str(path), fps=self.fps)
        else:
            export_to_video(frames, str(path), fps=self.fps)


def output_for(model: Model, path: Path, fps: int) -> Output:
    """Check, before anything is loaded, that what the pipeline makes can be written there.

    Raises:
        BadInput: it can't.
    """
    output = Output(path, fps)
    suffix = path.suffix.lower()
    if suffix not in IMAGES + VIDEOS:
        raise BadInput(
            f"--output is {str(path)!r}, but its suffix has to be one of {', '.join(IMAGES)} for images, or "
            f"{', '.join(VIDEOS)} for videos."
        )
    if model.makes == "sound":
        raise BadInput(f"{model.cls.__name__} makes sound, which can't be written here; call it from Python.")
    if output.is_video != (model.makes == "video"):
        allowed = VIDEOS if model.makes == "video" else IMAGES
        article = "a video" if model.makes == "video" else "an image"
        raise BadInput(
            f"{model.cls.__name__} makes {article}, which {path.name} can't hold; take one of {', '.join(allowed)}."
        )
    if not path.parent.is_dir():
        raise BadInput(f"--output is {str(path)!r}, but there is no folder {str(path.parent)!r}.")
    if suffix == ".mp4" and not _writes_mp4():
        raise BadInput('.mp4 needs two more libraries: pip install imageio "imageio-ffmpeg"; or take .gif.')
    return output


def _writes_mp4() -> bool:
    has = importlib.util.find_spec
    return bool((has("imageio") and has("imageio_ffmpeg")) or (has("cv2") and not has("imageio")))
