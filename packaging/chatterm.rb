# A formula for a tap; it has no resources, because torch has wheels and no source that Homebrew could build:
#   brew install --build-from-source ./packaging/chatterm.rb
class Chatterm < Formula
  desc "Terminal chat with its own inference engine"
  homepage "https://pypi.org/project/chatterm/"
  url "https://files.pythonhosted.org/packages/source/c/chatterm/chatterm-0.2.0.tar.gz"
  sha256 "" # of the released file: shasum -a 256 chatterm-0.2.0.tar.gz
  license "Apache-2.0"

  depends_on "python@3.13"

  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system python, "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-cache-dir", "#{buildpath}[server]"
    bin.install_symlink libexec/"bin/chatterm"
    man1.install_symlink libexec/"share/man/man1/chatterm.1"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/chatterm --version")
    assert_match "Machine", shell_output("#{bin}/chatterm doctor")
  end
end
