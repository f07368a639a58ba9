# PyTorch keeps what its tensors have freed. When others lack memory it is given back, by a thread of the library.
import atexit
import ctypes
import sys

torch = sys.modules.get("torch")
library = ctypes.CDLL(None)
kind = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)


@kind
def give_back(device, _missing, _user):
    try:
        before = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()
        return max(0, before - torch.cuda.memory_reserved(device))
    except Exception as error:  # It cannot be raised anywhere.
        print(f"gpumux: PyTorch did not give its cache back: {error!r}", file=sys.stderr)
        return 0


# PyTorch may be on its way still.
if hasattr(getattr(torch, "cuda", None), "empty_cache"):
    register = library.gpumux_on_reclaim
    register.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    if register(ctypes.cast(give_back, ctypes.c_void_p), None) == 0:
        # The interpreter must not be entered once it is ending.
        atexit.register(register, None, None)
        torch._gpumux_gives_back = give_back
        library.gpumux_caches_are_given_back()
