"""Kernel bodies: nothing but ``@triton.jit`` functions. They take pointers, integers, strides and block sizes.

The launchers beside this folder check every argument and choose every block size. Arguments in capitals are
compile-time constants; a runtime integer that could be 1 or a multiple of 16 by chance is listed under
``do_not_specialize``, so that the variants the compile gate checks are all the variants there are.
"""
