"""Which errors say that a disk is full, read-only or broken, or that a file on it is not what it should be."""

import errno
import os

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # that libraries in C++ mention in errors of their own
_BROKEN = (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
_BROKEN += (errno.ENAMETOOLONG,)


def storage_errno(error: BaseException | None, causes: bool = True) -> int | None:
    """The errno of a storage failure that an exception, or with `causes` one of its causes, is; None if none is one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL + _BROKEN:
            return error.errno
        for code in _FULL:
            if os.strerror(code).lower() in str(error).lower():
                return code
        error = (error.__cause__ or error.__context__) if causes else None
    return None
