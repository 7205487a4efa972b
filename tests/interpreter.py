"""Import this, and Triton 3.6 or older (torch 2.11 or older asks for it) can interpret a loop under numpy 2.4
or newer, too. There an array of one element no longer becomes an int, as the bounds of a loop must. Triton
mended that in 3.7: then delete this file."""
try:
    from triton import __version__
    from triton.runtime import interpreter
except ImportError:     # macOS and Windows have no Triton
    __version__ = "none"

if __version__.startswith(("3.5.", "3.6.")):
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_mend
