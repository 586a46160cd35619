"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits where it needs its results.

Every kernel of the chain tells its successor to start (`gdc_launch_dependents`) and waits (`gdc_wait`) before it
touches anything that the step itself computes; before that it may only load weights and what was settled before
the step began. PDL is off on GPUs before sm_90 and in the interpreter.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and their writes can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel of the chain start as soon as all programs of this one have come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
