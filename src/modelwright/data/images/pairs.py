"""Which files of a folder are images with captions.

The caption of `cat.jpg` stands in `cat.txt` or `cat.caption` beside it, or in a table `metadata.jsonl` or
`metadata.csv` of its folder or one above, whose records name it in `file_name` (the ImageFolder of Hugging Face
`datasets`).
"""

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from modelwright.data.readers import File

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg")
CAPTION_EXTENSIONS = (".txt", ".caption")
TABLES = ("metadata.jsonl", "metadata.csv")
NO_CAPTION = "image without a caption"


def without_captions(names: Sequence[str], pass_over: Callable[[str, str], None]) -> list[str]:
    """The files of a folder to read: an image stands for its caption file, too, and an image that a table describes is
    read with the table. Images without a caption are reported and left out.
    """
    paths = [PurePosixPath(name) for name in names]
    images = [path for path in paths if path.suffix.lower() in IMAGE_EXTENSIONS]
    if not images:
        return list(names)
    everything = set(paths)
    described = {path.parent for path in paths if path.name in TABLES}
    left_out: set[PurePosixPath] = set()
    for image in images:
        captions = [path for path in captions_of(image) if path in everything]
        if not described.isdisjoint(image.parents):
            left_out.add(image)
        elif captions:
            left_out.update(captions)
        else:
            left_out.add(image)
            pass_over(NO_CAPTION, str(image))
    return [name for name, path in zip(names, paths, strict=True) if path not in left_out]


def captions_of(image: PurePosixPath) -> list[PurePosixPath]:
    """The files that may hold the caption of an image."""
    return [image.with_suffix(extension) for extension in CAPTION_EXTENSIONS]


def companions(file: File) -> list[str]:
    """The files that are read together with one: the caption of an image, the images that a table may name."""
    path = PurePosixPath(file.path)
    if file.extension in IMAGE_EXTENSIONS:
        return [str(one) for one in captions_of(path) if file.filesystem.exists(str(one))]
    if path.name not in TABLES:
        return []
    return [
        str(name) for name in file.filesystem.find(str(path.parent)) if str(name).lower().endswith(IMAGE_EXTENSIONS)
    ]
