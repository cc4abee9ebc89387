"""What determines a data folder that is prepared from media."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.encoders import GIVEN_ENCODERS, GivenFrames
from alload_jax.data.prepare.sources import Bucket, Item, buckets_of
from alload_jax.encoders import TEXT_ENCODERS, VAE_ENCODERS
from alload_jax.encoders.loading import EncoderOptions, MediaEncoder, TextEncoder, VaeEncoder
from alload_jax.errors import InputError
from alload_jax.files import Json

DEFAULT_SCENE_THRESHOLD = 3.0
"""How many times as much as around it a picture must change at a scene change."""
_MOST_FPS = 1000


@dataclass(frozen=True)
class MediaSettings:
    """Settings of `alload prepare media`; each is the flag of that name.

    Attributes:
      vae: encoder of frames: none stores pixels, wan latents of Wan's VAE, hunyuan_video those of
        HunyuanVideo 1.5's, hunyuan_video_13b those of the first HunyuanVideo's; default none.
      vae_folder: local folder of the VAE's weights, as diffusers saves them.
      frames_per_latent: frames that a latent of pixels holds in its channels, which makes clips
        shorter in tokens: 1, 2 or 4; default 1.
      text: encoder of captions: bytes, class where captions are classes, umt5 for Wan's,
        hunyuan_video for HunyuanVideo 1.5's, hunyuan_video_13b for the first HunyuanVideo's;
        default bytes.
      text_folder: local folder of the text encoder's weights and tokenizer.
      text_length: most tokens of a caption; default: 256 bytes for bytes, 512 tokens for umt5, 1000
        for hunyuan_video, 256 for hunyuan_video_13b.
      captions: captions of a file to store: one, or all: each line of a .txt file, each entry of a
        list, the columns caption, caption_1, caption_2 and so on; an epoch takes one of them;
        default one.
      image_to_video: store what image-to-video models are given: first, or first-last for first and
        last frame, which Wan's models take; default: nothing.
      image_folder: local folder of their image encoder: CLIP for wan, SigLIP for hunyuan_video;
        default: none.
      area: area classes of the buckets: 192p, 256p, 480p, 512p, 720p, 1080p, or HEIGHTxWIDTH;
        default 480p.
      max_enlarge: smaller pictures than this needs are skipped; default 1.25.
      fps: frames per second of clips, a number or a fraction; default 16.
      frames: frames of a clip, 4n + 1; default 81.
      min_frames: shorter videos are skipped; default 1.
      stride_seconds: from the start of a clip to the next; default: the clip's length.
      max_clips: most clips of a video; default: all.
      scenes: cut videos at scene changes, by PySceneDetect; no clip goes across one.
      scene_threshold: how many times as much as around it a picture must change at a scene change;
        default 3.
      files_per_shard: input files in a shard; default 32.
    """

    vae: str = "none"
    vae_folder: str | None = None
    frames_per_latent: int = 1
    text: str = "bytes"
    text_folder: str | None = None
    text_length: int | None = None
    captions: str = "one"
    image_to_video: str | None = None
    image_folder: str | None = None
    area: tuple[str, ...] = ("480p",)
    max_enlarge: float = 1.25
    fps: str = "16"
    frames: int = 81
    min_frames: int = 1
    stride_seconds: float | None = None
    max_clips: int | None = None
    scenes: bool = False
    scene_threshold: float | None = None
    files_per_shard: int = 32

    def __post_init__(self) -> None:
        frames, folded = self.frames, self.frames_per_latent
        near = max(1, round((frames - 1) / 4) * 4 + 1)
        stride, threshold, length = self.stride_seconds, self.scene_threshold, self.text_length
        folds = folded == 1 or (folded in (2, 4) and self.vae == "none")
        is_ratio = threshold is None or 1 <= threshold < math.inf
        usual = f"at least 1 and finite, such as {DEFAULT_SCENE_THRESHOLD}"
        if threshold is not None and not self.scenes:
            raise InputError(f"--scene-threshold is {threshold}, but --scenes is missing; add it")
        for flag, fits, wanted in (
            ("frames", frames > 0 and frames % 4 == 1, f"4n + 1, such as {near}"),
            ("min-frames", 1 <= self.min_frames <= frames, f"from 1 to --frames {frames}"),
            ("frames-per-latent", folds, "1, or with --vae none 2 or 4"),
            ("text-length", length is None or self.text != "class", "left out with --text class"),
            ("max-clips", self.max_clips is None or self.max_clips >= 1, "at least 1"),
            ("files-per-shard", self.files_per_shard >= 1, "at least 1"),
            ("max-enlarge", 0 < self.max_enlarge < math.inf, "above 0 and finite"),
            ("stride-seconds", stride is None or 0 < stride < math.inf, "above 0 and finite"),
            ("scene-threshold", is_ratio, usual),
        ):
            if not fits:
                value = getattr(self, flag.replace("-", "_"))
                raise InputError(f"--{flag} is {value}; it must be {wanted}")
        if self.captions not in ("one", "all"):
            raise InputError(f"--captions is {self.captions!r}; choose one or all")
        if not self.area:
            raise InputError("--area is empty; name an area class such as 480p")
        _ = self.rate

    @property
    def rate(self) -> Fraction:
        """Frames per second.

        Raises:
          InputError: it is no number from above 0 to 1000.
        """
        try:
            rate = Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            rate = Fraction(0)
        if not 0 < rate <= _MOST_FPS:
            raise InputError(
                f"--fps is {self.fps}; give a number up to {_MOST_FPS}, such as 16 or 24000/1001"
            )
        return rate

    def areas(self, token: Sequence[int]) -> list[tuple[Bucket, ...]]:
        """The buckets of each area class, whose sides whole tokens cover; `token` is that of `Job`.

        Raises:
          InputError: an area class is unknown or does not fit the encoder.
        """
        return [buckets_of(area, max(16, *token[1:])) for area in self.area]

    @property
    def stride(self) -> int:
        """Frames from the start of a clip to that of the next."""
        if self.stride_seconds is None:
            return self.frames
        return max(1, round(Fraction(self.stride_seconds) * self.rate))

    @property
    def cut_threshold(self) -> float | None:
        """The threshold of scene changes; None if videos are not cut at them."""
        if not self.scenes:
            return None
        return DEFAULT_SCENE_THRESHOLD if self.scene_threshold is None else self.scene_threshold

    def encoders(self, items: Sequence[Item]) -> tuple[VaeEncoder, TextEncoder]:
        """The encoders that the settings name.

        Raises:
          InputError: a name is unknown, or an encoder refuses the options or captions.
        """
        captions = tuple(clean(caption) for item in items for caption in item.captions)
        vae, text = VAE_ENCODERS.get(self.vae), TEXT_ENCODERS.get(self.text)
        folder = _folder("--vae", self.vae, vae, self.vae_folder)
        made = vae.make(EncoderOptions(folder, frames_per_latent=self.frames_per_latent))
        folder = _folder("--text", self.text, text, self.text_folder)
        return made, text.make(EncoderOptions(folder, self._text_length, captions))

    def given_frames(self) -> GivenFrames | None:
        """The encoder of the frames that image-to-video models are given; None for none.

        Raises:
          InputError: the settings do not fit each other.
        """
        if self.image_to_video is None:
            if self.image_folder:
                raise InputError("--image-folder needs --image-to-video first or first-last")
            return None
        if self.vae not in GIVEN_ENCODERS.names() or not self.vae_folder:
            raise InputError(
                f"--image-to-video {self.image_to_video} needs latents of a VAE; give --vae "
                f"{' or --vae '.join(GIVEN_ENCODERS.names())}, with --vae-folder"
            )
        vae = Path(self.vae_folder).absolute()
        image = Path(self.image_folder).absolute() if self.image_folder else None
        return GIVEN_ENCODERS.get(self.vae).make(self.image_to_video, vae, image)

    @property
    def _text_length(self) -> int:
        if self.text_length is not None:
            return self.text_length
        return TEXT_ENCODERS.get(self.text).default_length

    def flags(self) -> Json:
        """The settings as JSON values, by flag; folders of weights may move."""
        names = (name for name in self.__dataclass_fields__ if not name.endswith("_folder"))
        values = {name: getattr(self, name) for name in names}
        values |= {"area": list(self.area), "fps": str(self.rate)}
        values |= {"text_length": self._text_length, "scene_threshold": self.cut_threshold}
        for name, usual in (("captions", "one"), ("frames_per_latent", 1)):
            if values[name] == usual:  # folders of earlier versions lack it
                del values[name]
        return {f"--{name.replace('_', '-')}": value for name, value in values.items()}

    def origin(self) -> Json:
        """The provenance that the manifest stores, without the encoders'."""
        left_out = ("--vae", "--text", "--text-length", "--image-to-video")
        media = {flag[2:]: value for flag, value in self.flags().items() if flag not in left_out}
        return {"media": media, "fps": str(self.rate)}


def _folder(flag: str, name: str, encoder: type[MediaEncoder], folder: str | None) -> Path | None:
    """The folder of an encoder's weights, which must be given where there are some."""
    if encoder.has_weights and not folder:
        raise InputError(f"{flag} {name} needs the folder of its weights; give {flag}-folder DIR")
    if folder and not encoder.has_weights:
        raise InputError(f"{flag} {name} has no weights; leave out {flag}-folder {folder}")
    return Path(folder).absolute() if folder else None


def items_digest(items: Sequence[Item]) -> str:
    """A digest of names, sizes and captions, which is equal for equal inputs."""
    found = hashlib.sha256()
    for item in items:
        size = item.source.size if item.source else -1
        first, rest = next(iter(item.captions), None), item.captions[1:]
        others: tuple[object, ...] = (rest,) if rest else ()
        told = (item.own, item.weight, item.dropout)
        others += () if told == ((), 1, 0) else told
        found.update(repr((item.name, size, first, item.reason, *others)).encode())
    return found.hexdigest()[:16]
