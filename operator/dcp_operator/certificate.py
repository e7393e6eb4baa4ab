"""The serving certificate of the webhook: files that something else renews, loaded again without a restart."""

import asyncio
import hashlib
import logging
import ssl
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_POLL_S: Final = 5.0
_MISSING_S: Final = 1.0


class Certificate:
    """The serving certificate of a folder (tls.crt, tls.key), loaded again when the files change."""

    def __init__(self, folder: Path) -> None:
        self._cert, self._key = folder / "tls.crt", folder / "tls.key"
        self._loaded = ""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    @property
    def is_loaded(self) -> bool:
        """Whether a certificate has been loaded."""
        return bool(self._loaded)

    def refresh(self) -> bool:
        """Load the files if they are not what was loaded last; return whether they were loaded.

        The context stays the same: connections that exist go on, new ones get the new certificate. Raises OSError
        (ssl.SSLError among them) where the files are missing or don't belong together.
        """
        digest = hashlib.sha256(self._cert.read_bytes() + b"\0" + self._key.read_bytes()).hexdigest()
        if digest == self._loaded:
            return False
        # On a context of its own first: files that don't belong together would leave the one in use without a key.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self._cert, self._key)
        self.context.load_cert_chain(self._cert, self._key)
        self._loaded = digest
        return True

    async def keep_fresh(self) -> None:
        """Look at the files every few seconds. A Secret's mount sends no events, so there is nothing to wait for."""
        said = ""
        while True:
            try:
                if self.refresh():
                    log.info("certificate loaded file=%s", self._cert)
                said = ""
            except OSError as error:
                if str(error) != said:
                    log.warning("certificate not usable file=%s error=%s", self._cert, error)
                    said = str(error)
            await asyncio.sleep(_POLL_S if self.is_loaded else _MISSING_S)
