#include <Python.h>

#include <mutex>
#include <unordered_map>

#include "clocks.h"

namespace emulated {

namespace {

bool wanted = true;
constexpr int kFrames = 3;

struct Place {
  PyCodeObject* code;
  int line;
  bool operator==(const Place&) const = default;
};
struct PlaceHash {
  size_t operator()(const Place& place) const {
    return std::hash<void*>{}(place.code) * 31 + place.line;
  }
};

// "file.py:12 function", or "" for a frame of PyTorch or of the emulator. Guarded by the GIL.
const std::string& text_of(PyCodeObject* code, int line) {
  static auto* texts = new std::unordered_map<Place, std::string, PlaceHash>;
  auto [found, added] = texts->try_emplace(Place{code, line});
  if (added) {
    Py_INCREF(code); // its address must not become another's
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* name = PyUnicode_AsUTF8(code->co_name);
    if (!file || !name) {
      PyErr_Clear();
      return found->second;
    }
    const std::string path(file);
    if (path.find("/torch/") == std::string::npos && path.find("/emulated/emulated/") == std::string::npos &&
        path.find("/contextlib.py") == std::string::npos) {
      const size_t slash = path.rfind('/');
      found->second =
          path.substr(slash == std::string::npos ? 0 : slash + 1) + ":" + std::to_string(line) + " " + name;
    }
  }
  return found->second;
}

} // namespace

void set_stacks(bool on) {
  wanted = on;
}

std::string python_stack() {
  if (!wanted || !Py_IsInitialized() || !PyGILState_GetThisThreadState())
    return "";
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *kind, *value, *traceback;
  PyErr_Fetch(&kind, &value, &traceback);
  std::string stack;
  int frames = 0;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame && frames < kFrames) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const std::string& text = text_of(code, PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    if (!text.empty()) {
      stack += (frames++ ? " < " : "") + text;
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyErr_Restore(kind, value, traceback);
  PyGILState_Release(gil);
  return stack;
}

} // namespace emulated
