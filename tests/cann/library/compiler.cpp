// CANN's compiler of operators and its graph engine. Nothing is compiled here, and no graph is run.
#include <acl/acl_op_compiler.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

extern "C" {

// No operator is compiled just in time, as on a 910B. Without an answer torch-npu 2.6.0 takes it that all are, in every
// thread but the one that has set it otherwise.
static const char JIT[] = "disable";

size_t aclGetCompileoptSize(aclCompileOpt option) { return option == ACL_OP_JIT_COMPILE ? sizeof JIT : 0; }

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
  if (option != ACL_OP_JIT_COMPILE || length < sizeof JIT) return ACL_ERROR_INVALID_PARAM;
  std::memcpy(value, JIT, sizeof JIT);
  return ACL_SUCCESS;
}

}  // extern "C"

// What torch-npu 2.6.0 wants when it is loaded: it declares operators of graphs. Newer releases ask for none of this.
namespace ge {

class AscendString {
 public:
  explicit AscendString(const char *);

 private:
  std::shared_ptr<std::string> text;
};

class Operator {
 public:
  Operator(const char *, const char *);
  Operator(const AscendString &, const AscendString &);
  virtual ~Operator() = default;

 protected:
  void AttrRegister(const char *, bool);
  void AttrRegister(const char *, int64_t);
  void InputRegister(const char *);
  void OutputRegister(const char *);
  void DynamicInputRegister(const char *, unsigned int, bool);
  void DynamicInputRegisterByIndex(const char *, unsigned int, size_t);
  void RequiredAttrRegister(const char *);

 private:
  std::shared_ptr<void> implementation;
};

class OperatorCreatorRegister {
 public:
  OperatorCreatorRegister(const char *, const std::function<Operator(const AscendString &)> &);
};

AscendString::AscendString(const char *given) : text(std::make_shared<std::string>(given)) {}

Operator::Operator(const char *, const char *) {}
Operator::Operator(const AscendString &, const AscendString &) {}
void Operator::AttrRegister(const char *, bool) {}
void Operator::AttrRegister(const char *, int64_t) {}
void Operator::InputRegister(const char *) {}
void Operator::OutputRegister(const char *) {}
void Operator::DynamicInputRegister(const char *, unsigned int, bool) {}
void Operator::DynamicInputRegisterByIndex(const char *, unsigned int, size_t) {}
void Operator::RequiredAttrRegister(const char *) {}

OperatorCreatorRegister::OperatorCreatorRegister(const char *, const std::function<Operator(const AscendString &)> &) {}

}  // namespace ge
