"""Finding a kernel in CUDA C++ text."""

from __future__ import annotations

import pytest

from aiocuda.errors import CompileError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from aiocuda.kernels._source import MAX_SOURCE_BYTES, find_kernel, has_dynamic_shared, read_source, refuse_includes


@pytest.mark.parametrize(
    ("declared", "shown", "codes"),
    [
        ("", "f()", ""),
        ("void", "f()", ""),
        ("int", "f(int)", "i"),
        ("unsigned", "f(unsigned int)", "I"),
        ("unsigned n", "f(unsigned int n)", "I"),
        ("signed char c, unsigned char d, char e", "f(signed char c, unsigned char d, char e)", "bBb"),
        ("short int a, int unsigned short b", "f(short a, unsigned short b)", "hH"),
        ("long long int a, unsigned long b", "f(long long a, unsigned long b)", "qL"),
        ("bool b, float f, double d, __half h", "f(bool b, float f, double d, __half h)", "?fde"),
        ("std::size_t n, ::uint8_t b, cuda::std::int64_t i", "f(size_t n, uint8_t b, int64_t i)", "QBq"),
        ("const float* __restrict__ x", "f(const float* x)", "P"),
        ("float const *const x", "f(const float* x)", "P"),
        ("float* const x", "f(float* x)", "P"),
        ("const void *p, void* q", "f(const void* p, void* q)", "PP"),
        ("float x[], const int table[16]", "f(float* x, const int* table)", "PP"),
        ("float** rows, const float* const* fixed", "f(float** rows, const float* const* fixed)", "PP"),
        ("volatile unsigned long long *n", "f(unsigned long long* n)", "P"),
        ("float2* a, const cuFloatComplex* b, half2* c", "f(float2* a, const cuFloatComplex* b, half2* c)", "PPP"),
        ("__nv_bfloat16* b, std::byte* raw", "f(__nv_bfloat16* b, byte* raw)", "PP"),
        ("Pair* p, const struct Pair *q, a::Pair r[]", "f(Pair* p, const Pair* q, a::Pair* r)", "PPP"),
        ("::Pair const* const p, std::Pair* volatile q", "f(const ::Pair* p, std::Pair* q)", "PP"),
        ("const __grid_constant__ int n = (1, 2)", "f(int n)", "i"),
        ("[[maybe_unused]] int n", "f(int n)", "i"),
        ("float *x, // the vector, in place\n /* how many */ int n", "f(float* x, int n)", "Pi"),
        ("float* x\n#if 0\n, int n\n#endif\n", "f(float* x, int n)", "Pi"),
    ],
)
def test_parameters_are_read(declared: str, shown: str, codes: str) -> None:
    _, signature = find_kernel(f"__global__ void f({declared}) {{ }}", "f")
    assert str(signature) == shown
    assert signature.format == codes


@pytest.mark.parametrize(
    ("declared", "const"),
    [
        ("float* x", False),
        ("const float* x", True),
        ("float const* x", True),
        ("float* const x", False),
        ("const float** x", False),
        ("float* const* x", True),
        ("const float x[3]", True),
    ],
)
def test_const_of_a_pointer_is_that_of_its_target(declared: str, const: bool) -> None:
    _, signature = find_kernel(f"__global__ void f({declared});", "f")
    assert signature.parameters[0].is_const is const


@pytest.mark.parametrize(
    "declared",
    [
        "Grid grid",
        "struct Grid grid",
        "Pair<int>* x",
        "long double* x",
        "unsigned Grid* x",
        "enum Colour* x",
        "thrust::complex<float>* z",
        "const int& n",
        "float (*x)[3]",
        "...",
        "long double d",
        "unsigned float f",
        "__nv_bfloat16 b",
        "float2 xy",
        "void v",
        "int a b",
        "cudaTextureObject_t t",
    ],
)
def test_a_type_that_cannot_be_passed_is_named(declared: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        find_kernel(f"__global__ void f(int first, {declared}) {{ }}", "f")
    assert "parameter 2 of kernel 'f'" in str(caught.value)
    assert "size_t" in str(caught.value)  # the message lists what is supported
    assert str(caught.value).endswith("write the type itself")
    assert (caught.value.kernel, caught.value.index) == ("f", 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    [
        'extern "C" __global__ void __launch_bounds__(256, 2) f(int n) { }',
        "__launch_bounds__(256) __global__ static void f(int n) { }",
        "[[nodiscard]] __global__\nvoid\nf\n(\nint n) { }",
        "__global__ \\\nvoid f(int n) { }",
        "// __global__ void f(float x);\n__global__ void f(int n) { }",
        "/* __global__ void f(float x); */ __global__ void f(int n) { }",
        '__device__ const char* s = "; __global__ void f(float x);"; __global__ void f(int n) { }',
        '__device__ const char* s = R"x(" __global__ void f(float x); )" )x"; __global__ void f(int n) { }',
        "__device__ char c = '\"', d = L'\\''; __device__ int big = 1'000'000; __global__ void f(int n) { }",
        "#define DECLARE __global__ void f(float x) \\\n  { }\n__global__ void f(int n) { }",
        "__device__ void f(float x); __global__ void ff(float x); __global__ void f(int n) { }",
        "template <typename T> struct S { }; __global__ void f(int n) { }",
        "__global__ void f(int n); __global__ void g() { f(1.0f); } __global__ void f(int count) { }",
    ],
)
def test_the_kernel_is_found_among_other_text(text: str) -> None:
    qualified, signature = find_kernel(text, "f")
    assert (qualified, signature.format) == ("f", "i")


@pytest.mark.parametrize(
    ("text", "qualified"),
    [
        ("namespace a { __global__ void f(); }", "a::f"),
        ("namespace a::b { __global__ void f(); }", "a::b::f"),
        ("namespace a { namespace b { } namespace c { __global__ void f(); } }", "a::c::f"),
        ("namespace a { __device__ void g() { { } } } __global__ void f();", "f"),
        ("namespace { __global__ void f(); }", "f"),
        ('inline namespace [[deprecated]] v1 { extern "C++" { __global__ void f(); } }', "v1::f"),
        ("namespace a::inline b { __global__ void f(); }", "a::b::f"),
        ("namespace short_name = a::b; using namespace c; __global__ void f();", "f"),
    ],
)
def test_namespaces_qualify_the_name(text: str, qualified: str) -> None:
    assert find_kernel(text, "f")[0] == qualified


def test_a_template_needs_arguments_and_a_parameter_list() -> None:
    with pytest.raises(UnsupportedError, match=r"'f' is a template: .*Kernel\('f<float>', .*parameters="):
        find_kernel("template <typename T> __global__ void f(T* x) { }", "f")


TEMPLATES = {
    "template <typename T> __global__ void f(T* x) { }": "f",
    "template <typename T, int N = (4 > 3)>\n__global__ void __launch_bounds__(N) f (T* x, int n) { }": "f",
    "namespace a::b { template <class T> __global__ void f(T*); template <class T> __global__ void f(T*) { } }": (
        "a::b::f"
    ),
    "template <class T> __global__ void f(T* x) { } template <> __global__ void f<int>(int* x) { }": "f",
    "template <class T> __global__ void f(T* x) { } template __global__ void f<int>(int* x);": "f",
}


@pytest.mark.parametrize("text", TEMPLATES)
@pytest.mark.parametrize("arguments", ["<float>", "<float, 4>", "<a::b<int>, (1 + 2)>"])
def test_an_instance_of_a_template_is_found(text: str, arguments: str) -> None:
    qualified, signature = find_kernel(text, f"f{arguments}", "const float* x, int n")
    assert qualified == TEMPLATES[text] + arguments
    assert str(signature) == f"f{arguments}(const float* x, int n)"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("__global__ void f(float* x) { }", UnsupportedError, r"'f' is no template: use Kernel\('f', source="),
        ("template <class T> __device__ void f(T* x) { }", CompileError, "no kernel 'f' in the source"),
        ("template <class T> __global__ void g(T* x) { }", CompileError, "no kernel 'f' in the source"),
        (
            "namespace a { template <class T> __global__ void f(T*); } template <class T> __global__ void f(T*);",
            UnsupportedError,
            "is ambiguous",
        ),
    ],
)
def test_what_is_no_template_has_no_instance(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        find_kernel(text, "f<float>", "float* x")


@pytest.mark.parametrize(
    "text",
    [
        "#if X\n__global__ void f(float x) { }\n#else\n__global__ void f(double x) { }\n#endif",
        "__global__ void f(const float* x); __global__ void f(float* x) { }",
        "namespace a { __global__ void f(); } namespace b { __global__ void f(); }",
    ],
)
def test_declarations_that_differ_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="'f' is ambiguous"):
        find_kernel(text, "f")


@pytest.mark.parametrize(
    "text",
    ["", "__global__ void g() { }", "__device__ void f() { }", "// __global__ void f();", "/* __global__ void f();"],
)
def test_a_missing_kernel_is_a_compile_error(text: str) -> None:
    with pytest.raises(CompileError, match="no kernel 'f' in the source") as caught:
        find_kernel(text, "f")
    assert caught.value.log == ""


def test_a_parameter_list_without_an_end() -> None:
    with pytest.raises(CompileError, match="does not end"):
        find_kernel("__global__ void f(int a, int b", "f")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('#include "/etc/passwd"', 1),
        ("\n  #  include <x>", 2),
        ("/* one\n two */ #include <x>", 2),
        ("int a; \\\n int b;\n#include <x>", 3),
        ("#incl\\\nude <x>", 1),
        ("#\\\ninclude <x>", 1),
        ('%:include "x"', 1),
        ("#/**/include X", 1),
        ("#include_next <x>", 1),
        ("#import <x>", 1),
        ('#embed "x"', 1),
        ("#define Q '\"'\n#include <x>", 2),
    ],
)
def test_every_way_to_include_is_refused(text: str, line: int) -> None:
    with pytest.raises(CompileError, match=rf"line {line}: #\w+ is refused, because includes=False"):
        refuse_includes(text)


def test_directives_without_files_are_accepted() -> None:
    refuse_includes(
        "#define A \\\n #include <x>\n#\n#if defined(A) // #include <x>\n#pragma once\n#elif B\n#else\n#endif\n"
        '/*\n#include <x>\n*/\nconst char* s = R"(\n#include <x>\n)";\n#line 7 "x"\n'
    )


def test_source_may_be_bytes() -> None:
    assert read_source("μ".encode()) == "μ"


@pytest.mark.parametrize("source", [None, 3, bytearray(b"x"), ["x"]])
def test_source_of_another_type(source: object) -> None:
    with pytest.raises(InvalidTypeError, match="source must be str or bytes"):
        read_source(source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\0b", "NUL character at position 1"),
        (b"ab\0", "NUL character at position 2"),
        (b"ab\xff", "not valid UTF-8.* position 2"),
        ("ab\udcff", "not valid UTF-8.* position 2"),
    ],
)
def test_source_that_no_compiler_reads(source: str | bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_source(source)


def test_source_beyond_the_limit() -> None:
    assert len(read_source(b" " * MAX_SOURCE_BYTES)) == MAX_SOURCE_BYTES
    with pytest.raises(InvalidArgumentError, match="16 MiB") as caught:
        read_source("é" + " " * (MAX_SOURCE_BYTES - 1))
    assert caught.value.size == MAX_SOURCE_BYTES + 1  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(60)  # each takes 0.1 to 0.4 s; what is quadratic in a million characters takes hours
@pytest.mark.parametrize("piece", ["/*", '"', "'", 'R"x(', "\\\n", "#", "(", ";", "a", "__global__ ", "\n\\ "])
def test_a_hostile_source_takes_linear_time(piece: str) -> None:
    text = piece * (2**20 // len(piece))
    with pytest.raises(CompileError):
        find_kernel(text, "f")


DYNAMIC = "extern __shared__ float part[];"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"__global__ void f(float* x) {{ {DYNAMIC} }}", True),
        (f"template <class T> __global__ void f(T* x) {{ if (x) {{ }} {DYNAMIC} }}", True),
        (f"__global__ void f(float* x); __global__ void f(float* x) {{ {DYNAMIC} }}", True),
        (f"__global__ void f(float* x) {{ }} __global__ void g(float* x) {{ {DYNAMIC} }}", False),
        (f"__global__ void f(float* x) {{ }} __device__ void help() {{ {DYNAMIC} }}", False),
        ("__global__ void f(float* x) { __shared__ float part[256]; }", False),
        (f"__global__ void f(float* x) {{ /* {DYNAMIC} */ }}", False),
        (f"__global__ void f(float* x) {{ {DYNAMIC}", True),
    ],
)
def test_dynamic_shared_memory_of_a_kernel_is_found(text: str, found: bool) -> None:
    assert has_dynamic_shared(text, "f") is found
