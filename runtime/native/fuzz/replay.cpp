// Runs a fuzz target on kept inputs, without a fuzzer: every file of the folders that are named.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

int main(int n_arguments, char **arguments) {
  size_t n_inputs = 0;
  for (int idx = 1; idx < n_arguments; ++idx) {
    if (!std::filesystem::is_directory(arguments[idx])) {
      continue;  // nothing was ever found by this target
    }
    for (const auto &entry : std::filesystem::directory_iterator(arguments[idx])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
      std::fprintf(stderr, "%s\n", entry.path().c_str());
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size());
      ++n_inputs;
    }
  }
  return n_inputs > 0 ? 0 : 1;  // a corpus that is not there tests nothing
}
