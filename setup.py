"""Only what setup.cfg cannot say: editable installs carry the start-up files too."""

from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

STARTUP_FILES = ("npu_patch.pth", "npu_patch.start")


class EditableWheel(editable_wheel):
    """The usual editable wheel plus the start-up files, listed in its RECORD so that uninstalling removes them."""

    def run(self) -> None:
        super().run()
        (path,) = Path(self.dist_dir).glob("npu_patch-*.whl")
        with ZipFile(path) as wheel:
            contents = {name: wheel.read(name) for name in wheel.namelist()}
        (record,) = (name for name in contents if name.endswith(".dist-info/RECORD"))
        for name in STARTUP_FILES:
            data = Path(name).read_bytes()
            digest = urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
            contents[name] = data
            contents[record] += f"{name},sha256={digest},{len(data)}\n".encode()
        with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
            for name, data in contents.items():
                wheel.writestr(name, data)


setup(cmdclass={"editable_wheel": EditableWheel})
