"""block_sum.cu as a subject: compiled by nvcc where there is one, else the same kernel in PTX written by hand."""

import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from tests.emulator.subjects.subject import Subject, random_tensor, unwritten

SOURCE = Path(__file__).with_name("block_sum.cu")
THREADS = 256


def block_sum(n: int = 1000, seed: int = 0, use_nvcc: bool = True) -> Subject:
    """use_nvcc False takes the hand-written PTX even where nvcc exists."""
    blocks = -(-n // THREADS)
    x, y = random_tensor((n,), torch.float32, seed), unwritten((blocks + 1,), torch.float32)
    y[-1] = 0
    padded = torch.nn.functional.pad(x.double(), (0, blocks * THREADS - n)).view(blocks, THREADS)
    expected = torch.cat([padded.sum(1), padded.sum().view(1)])
    ptx = compile_with_nvcc() if use_nvcc and nvcc_path() else HAND_WRITTEN
    return Subject("block_sum", ptx, (x, y, n), (blocks, 1, 1), y, expected, 1e-4, block=(THREADS, 1, 1))


def nvcc_path() -> str | None:
    """That of requirements/test.txt, or one in the path; it calls a host compiler for the preprocessor."""
    installed = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
    found = str(installed) if installed.exists() else shutil.which("nvcc")
    return found if found and (shutil.which("gcc") or shutil.which("cc")) else None


def compile_with_nvcc() -> str:
    """block_sum.cu -> PTX for sm_90a."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "block_sum.ptx")
        command = [nvcc_path() or "nvcc", "-ptx", "-gencode=arch=compute_90a,code=compute_90a", "-o", str(ptx), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return ptx.read_text()


HAND_WRITTEN = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry block_sum(.param .u64 x, .param .u64 y, .param .u32 n)
{
    .shared .align 4 .b8 partial[1024];
    .reg .pred %outside, %tree, %leader;
    .reg .b32 %t, %cta, %i, %n, %mine, %other, %width, %offset, %blocks;
    .reg .b64 %x, %y, %at;
    .reg .f32 %sum, %part;

    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u32 %n, [n];
    cvta.to.global.u64 %x, %x;
    cvta.to.global.u64 %y, %y;
    mov.u32 %t, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mad.lo.s32 %i, %cta, 256, %t;
    setp.ge.s32 %outside, %i, %n;
    mov.f32 %sum, 0f00000000;
    mul.wide.s32 %at, %i, 4;
    add.s64 %at, %at, %x;
    @!%outside ld.global.f32 %sum, [%at];
    mov.u32 %mine, partial;
    mad.lo.u32 %mine, %t, 4, %mine;
    st.shared.f32 [%mine], %sum;
    bar.sync 0;

    mov.u32 %width, 128;
halve:
    setp.lt.u32 %tree, %t, %width;
    mad.lo.u32 %other, %width, 4, %mine;
    @%tree ld.shared.f32 %sum, [%mine];
    @%tree ld.shared.f32 %part, [%other];
    @%tree add.f32 %sum, %sum, %part;
    @%tree st.shared.f32 [%mine], %sum;
    bar.sync 0;
    shr.u32 %width, %width, 1;
    setp.ge.u32 %tree, %width, 32;
    @%tree bra halve;

    setp.ge.u32 %outside, %t, 32;
    @%outside bra done;
    ld.shared.f32 %sum, [%mine];
    mov.u32 %offset, 16;
fold:
    shfl.sync.down.b32 %part, %sum, %offset, 31, 0xffffffff;
    add.f32 %sum, %sum, %part;
    shr.u32 %offset, %offset, 1;
    setp.ne.u32 %tree, %offset, 0;
    @%tree bra fold;

    setp.ne.u32 %leader, %t, 0;
    @%leader bra done;
    mul.wide.u32 %at, %cta, 4;
    add.s64 %at, %at, %y;
    st.global.f32 [%at], %sum;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %at, %blocks, 4;
    add.s64 %at, %at, %y;
    red.global.add.f32 [%at], %sum;
done:
    ret;
}
"""
