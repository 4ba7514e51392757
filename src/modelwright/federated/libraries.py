"""The one place that imports `cryptography`, with a message where it is missing."""

from typing import Any

from modelwright.core.errors import ConfigError

MISSING = "federated: needs the package cryptography, which is not installed: pip install 'modelwright[federated]'"


def x25519() -> Any:
    """The module of X25519 keys. Raises `ConfigError` without the package, as all functions here."""
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ImportError:
        raise ConfigError(MISSING) from None
    return x25519


def derive_key(secret: bytes, *, salt: bytes, purpose: str) -> bytes:
    """32 bytes from a shared secret, by HKDF with SHA-256 (RFC 5869)."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise ConfigError(MISSING) from None
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=purpose.encode()).derive(secret)


def sealing_cipher(key: bytes) -> Any:
    """ChaCha20-Poly1305 (RFC 8439): encrypts, and notices any change."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError:
        raise ConfigError(MISSING) from None
    return ChaCha20Poly1305(key)


def key_stream(seed: bytes, num_bytes: int) -> bytes:
    """Pseudo-random bytes from a 32-byte seed: ChaCha20's key stream. A seed is used for one stream only."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    except ImportError:
        raise ConfigError(MISSING) from None
    return Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(num_bytes))
